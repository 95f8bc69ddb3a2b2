"""Prompts out of numbered blocks: equal numbers are equal tokens, so that what begins alike really begins alike.

Mooncake's traces say of each prompt which blocks it has and nothing of what is in them.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPrompt:
    """`num_tokens` of the blocks' tokens, one block after another; the last of them may be cut."""

    blocks: tuple[int, ...]
    num_tokens: int
    block_tokens: int
    vocab_size: int
    seed: int = 0

    def __len__(self) -> int:
        return self.num_tokens

    def tokens(self) -> list[int]:
        parts = [block_tokens(self.seed, block, self.block_tokens, self.vocab_size) for block in self.blocks]
        return np.concatenate(parts)[: self.num_tokens].tolist()


def block_tokens(seed: int, block: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """[num_tokens] int64 of ids below `vocab_size`, by seed and block alone; a shorter block begins a longer one."""
    return np.random.Generator(np.random.Philox(key=[seed, block])).integers(vocab_size, size=num_tokens)
