"""A stack of weights as the kernels take it: values, scales, and how many rows and columns share one of these."""

from typing import NamedTuple

import jax.numpy as jnp

from moonshard.models.formats.quantised import Quantised, Weight
from moonshard.sharding.arrays import Array


class Operands(NamedTuple):
    """Of a stack [layers, ..., rows, columns]. The type of the values tells the format."""

    values: Array
    scales: Array  # of an array there are none
    block_rows: int
    block_columns: int


def operands(stack: Weight) -> Operands:
    if isinstance(stack, Quantised):
        rows, columns = (1, *stack.block)[-2:]
        return Operands(stack.values, stack.scales, rows, columns)
    return Operands(stack, jnp.zeros(0, jnp.float32), 1, 1)
