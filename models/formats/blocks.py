"""Scales and the blocks of values that share one: as many dimensions as the values, each cut into equal blocks.

The last block of a dimension may be ragged. Everything here takes numpy's and jax's arrays alike.
"""

import math
from collections.abc import Sequence

import numpy as np


def num_blocks(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """How many blocks each dimension has. `block` is of the last dimensions; of those before, each value is its own."""
    whole = whole_block(len(shape), block)
    return tuple(-(-size // own) for size, own in zip(shape, whole, strict=True))


def whole_block(num_dimensions: int, block: Sequence[int]) -> tuple[int, ...]:
    """The block along every dimension, of one along the last."""
    return (*(1,) * (num_dimensions - len(block)), *block)


def spread[Scales](scales: Scales, block: Sequence[int], shape: Sequence[int]) -> Scales:
    """Each scale at every value that it scales: of the blocks' shape to `shape`."""
    found: np.ndarray = scales  # pyright: ignore[reportAssignmentType]: or jax's, which has the same methods
    first = len(shape) - len(block)
    for axis, own in enumerate(block, first):
        if own > 1:
            found = found.repeat(own, axis=axis)
    return found[(..., *(slice(size) for size in shape[first:]))]  # pyright: ignore[reportReturnType]


def largest(values: np.ndarray, block: Sequence[int]) -> np.ndarray:
    """The largest magnitude of each block: of the values' shape to the blocks'. The ranks are equal."""
    counts = num_blocks(values.shape, block)
    missing = [(0, count * own - size) for size, own, count in zip(values.shape, block, counts, strict=True)]
    padded = np.pad(np.abs(values), missing)
    parts = [part for count, own in zip(counts, block, strict=True) for part in (count, own)]
    return padded.reshape(parts).max(axis=tuple(range(1, 2 * len(counts), 2)))


def refined(block: int, *sizes: int) -> int:
    """The largest block that divides this one and all of these sizes: each of its parts has one scale still."""
    return math.gcd(block, *sizes)
