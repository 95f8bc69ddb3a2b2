"""Prompts out of numbered blocks: equal numbers are equal tokens, so that what begins alike really begins alike.

Mooncake's traces say of each prompt which blocks it has and nothing of what is in them.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPrompt:
    """`num_tokens` of the blocks' tokens, one block after another; the last of them may be cut.

    Blocks end at multiples of `block_tokens`, each rounded by itself, so that together they are as long as they should
    be: at 2.56 tokens a block the first hundred have 256.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    block_tokens: float
    vocab_size: int
    seed: int = 0

    def __len__(self) -> int:
        return self.num_tokens

    def tokens(self) -> list[int]:
        ends = [round(index * self.block_tokens) for index in range(len(self.blocks) + 1)]
        parts = [
            block_tokens(self.seed, block, end - start, self.vocab_size)
            for block, (start, end) in zip(self.blocks, pairwise(ends), strict=True)
        ]
        return np.concatenate(parts)[: self.num_tokens].tolist()


def block_tokens(seed: int, block: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """[num_tokens] int64 of ids below `vocab_size`, by seed and block alone; a shorter block begins a longer one."""
    key = np.array([seed, block], np.uint64)  # as a list of numbers large ones would be rounded, and be alike
    return np.random.Generator(np.random.Philox(key=key)).integers(vocab_size, size=num_tokens)
