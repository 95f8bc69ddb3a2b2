"""What is in a JSON body, read off its bytes before it is decoded: how many values of which kind, and how deep.

By the marks that stand outside of strings: each object begins with `{`, each list with `[`, each member has a `:`, and
each value that is not the first of its list or object a `,` before it. Strings are told from the rest a piece at a
time, by numpy, which lets go of Python's lock.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

OBJECT_BYTES = 512  # a message of a few characters takes as many, from the body's struct to the template's dict
LIST_BYTES = 128
MEMBER_BYTES = 112
VALUE_BYTES = 16  # a token id, in the messages that it goes through
FEW_BYTES = 1 << 16  # what is made of a body with no more needs no closer look
FEW_LEVELS = 64  # likewise
PIECE_BYTES = 1 << 20
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_MARKS = (b"{", b"[", b":", b",")


@dataclass(frozen=True, slots=True)
class Contents:
    """How many values of each kind a body has. `num_levels`: the deepest nesting of its objects and lists, or more."""

    num_objects: int = 0
    num_lists: int = 0
    num_members: int = 0
    num_values: int = 0
    num_levels: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes that its decoded values take, besides the body."""
        return (
            OBJECT_BYTES * self.num_objects
            + LIST_BYTES * self.num_lists
            + MEMBER_BYTES * self.num_members
            + VALUE_BYTES * self.num_values
        )

    @property
    def num_in_all(self) -> int:
        """The number of values of every kind."""
        return self.num_objects + self.num_lists + self.num_values


def contents_of(body: bytes, enough: int | None = None) -> Contents:
    """What is in a body. Where marks are few, those within strings are counted too. Counting ends beyond `enough`
    values.
    """
    num_objects, num_lists, num_members, num_values = (_count(body, mark) for mark in _MARKS)
    most = Contents(num_objects, num_lists, num_members, num_values, num_objects + num_lists)
    if most.num_bytes <= FEW_BYTES and most.num_levels <= FEW_LEVELS:
        return most
    counts, level, num_levels = [0] * len(_MARKS), 0, 0
    for piece, is_outside in _pieces(body):
        found = [(piece == ord(mark)) & is_outside for mark in _MARKS]
        counts = [before + int(np.count_nonzero(is_mark)) for before, is_mark in zip(counts, found, strict=True)]
        level, highest = _levels(found[0] | found[1], ((piece == ord("}")) | (piece == ord("]"))) & is_outside, level)
        num_levels = max(num_levels, highest)
        if enough is not None and counts[0] + counts[1] + counts[3] > enough:
            break
    return Contents(counts[0], counts[1], counts[2], counts[3], num_levels)


def _count(body: bytes, mark: bytes) -> int:
    """Counts in pieces, since Python's lock is held for each."""
    return sum(body.count(mark, start, start + PIECE_BYTES) for start in range(0, len(body), PIECE_BYTES))


def _levels(begins: np.ndarray, ends: np.ndarray, level: int) -> tuple[int, int]:
    """How many objects and lists are open after a piece, before which `level` were, and the most that were open in
    it.
    """
    steps = begins.view(np.int8) - ends.view(np.int8)
    open_levels = np.cumsum(steps[steps != 0], dtype=np.int32)
    if not len(open_levels):
        return level, level
    return level + int(open_levels[-1]), level + max(0, int(open_levels.max()))


def _pieces(body: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces of a body, and which of their characters stand outside of strings."""
    in_string = odd = False
    for start in range(0, len(body), PIECE_BYTES):
        piece = np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - start), start)
        escaped, odd = _escaped(piece, odd)
        quotes = (piece == _QUOTE) & ~escaped
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)).view(bool) ^ in_string
        yield piece, ~inside
        in_string = bool(inside[-1])


def _escaped(piece: np.ndarray, odd: bool) -> tuple[np.ndarray, bool]:
    """Which characters follow an odd number of backslashes. `odd`: whether an odd number stands before the piece."""
    slashes = piece == _BACKSLASH
    if not odd and not slashes.any():
        return slashes, False
    place = np.arange(len(piece), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(slashes, -1, place))  # the nearest to the left that is no backslash
    run = place - last_other  # backslashes that end here
    begins_piece = last_other < 0
    run = np.where(begins_piece, place + 1 + odd, run)
    is_odd = slashes & (run % 2 == 1)
    escaped = np.empty(len(piece), bool)
    escaped[0], escaped[1:] = odd, is_odd[:-1]
    return escaped, bool(is_odd[-1])
