"""What every tokenizer is made of, whatever file it came from: a table of token bytes, and something that encodes.

Both readers (`hugging_face`, `tiktoken_file`) build these parts, and `tokenizer` puts them together. Pieces are bytes
and not strings, because one character may be spread over several tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class TokenizerError(ValueError):
    """A model folder whose tokenizer cannot be used: names file and cause."""


class TextError(ValueError):
    """A text that cannot be tokenised: a lone surrogate, or more than the pattern matcher can take."""


class TextTooLongError(ValueError):
    """A text of more tokens than were asked for: it has at least `num_tokens`. The rest was not looked at."""

    def __init__(self, num_tokens: int):
        super().__init__(f"the text has at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class TokenIdError(ValueError):
    """A token id that the tokenizer does not have."""


@runtime_checkable  # annotations are checked in tests
class Encoder(Protocol):
    """Text to ids, safe to call from several threads. The text has no lone surrogates."""

    def plain(self, text: str) -> list[int]:
        """Ids of `text`, in which the name of a special token is text like any other."""
        ...

    def with_specials(self, text: str) -> list[int]:
        """Ids of `text`, in which the name of a special token is that token."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """`pieces[id]` is the token's bytes, a special token's being its name; None where there is no such token."""

    pieces: tuple[bytes | None, ...]
    special_tokens: Mapping[str, int]
    hidden_ids: frozenset[int]  # the special tokens that are no part of the text a client sees
    num_dropped_spaces: int = 0  # at most so many leading spaces of a text's first token are no part of the text
    max_token_bytes: int | None = None  # no token stands for more of a text; None: one may stand for any length


def name_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Finds the leftmost of these names, the longest where several begin; nothing when there are none."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@contextmanager
def foreign_errors(error: type[ValueError], what: str) -> Iterator[None]:
    """Raises `error` for whatever a tokenizer library raises.

    `tokenizers` raises bare `Exception`, and a Rust panic arrives as a `BaseException` that cannot be imported.
    """
    try:
        yield
    except BaseException as cause:
        if isinstance(cause, Exception) or type(cause).__name__ == "PanicException":
            raise error(f"{what}: {cause}") from cause
        raise
