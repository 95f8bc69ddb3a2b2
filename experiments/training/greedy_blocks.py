"""Which blocks of the evaluator's pages are free, and which hold the beginning of a prompt already.

Needs no device. It shares no code with `kv.blocks`, which serves, so that an error there cannot be an error of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK_SIZE = 64  # tokens
ROOT = -1  # the block before the first


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Placed:
    """A prompt with its blocks, of which the first `num_known` hold its beginning already."""

    tokens: Sequence[int]
    blocks: tuple[int, ...]
    num_known: int


@dataclass(slots=True)
class Blocks:
    """The free and the filled blocks. A block's content is identified by the block before it and its own tokens."""

    num_blocks: int
    free: list[int] = field(init=False)
    _known: dict[tuple[int, tuple[int, ...]], int] = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Frees all blocks. Call it only while no prompt is placed."""
        self._known = {}
        self.free = list(range(self.num_blocks))

    def place(self, tokens: Sequence[int], num_tokens: int) -> Placed:
        """Blocks for a prompt that may grow to `num_tokens`; IndexError where too few are free.

        Its whole blocks are known from now on, but for one that the last token lies in: that token has to be computed
        to see what follows it.
        """
        blocks: list[int] = []
        num_known = 0
        for start in range(0, _num_shared(tokens) * BLOCK_SIZE, BLOCK_SIZE):
            key = (blocks[-1] if blocks else ROOT, tuple(tokens[start : start + BLOCK_SIZE]))
            num_known += key in self._known
            if key not in self._known:
                self._known[key] = self.free.pop()
            blocks.append(self._known[key])
        blocks += [self.free.pop() for _ in range(num_blocks_of(num_tokens) - len(blocks))]
        return Placed(tokens, tuple(blocks), num_known)

    def release(self, placed: Placed) -> None:
        """Frees the blocks that no other prompt can share."""
        self.free += placed.blocks[_num_shared(placed.tokens) :]


def _num_shared(tokens: Sequence[int]) -> int:
    """How many blocks of a prompt other prompts may share."""
    return (len(tokens) - 1) // BLOCK_SIZE
