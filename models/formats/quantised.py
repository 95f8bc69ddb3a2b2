"""A weight held in the format in which it is stored. It stands wherever an array of its values could.

Where a mesh cuts it, values and scales are cut alike, as two arrays with the same axes: a block that a cut would go
through is made smaller for the whole weight, and its scale is held by both sides (`models.weights`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moonshard.models.formats.blocks import spread
from moonshard.models.formats.format import BF16
from moonshard.models.formats.known import FORMATS
from moonshard.models.pytree import pytree
from moonshard.sharding.arrays import Array, Float


@pytree
class Quantised[Leaf]:
    """A weight, or several of equal shape along leading dimensions, by which it may be indexed as a tree of arrays.

    The static fields stay true of what a device has of it, and of what is taken out of a stack.
    """

    values: Leaf  # int4: int32 [..., out, ceil(in / 8)], as in the file; fp8: float8_e4m3fn, int8: int8 [..., out, in]
    scales: Leaf  # of the same rank, one to each block
    format: str = dataclasses.field(metadata={"static": True})  # of `known.FORMATS`
    block: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # along the last dimensions; before them 1
    size: int = dataclasses.field(metadata={"static": True})  # values along the last dimension of the whole weight

    @property
    def shape(self: "Quantised[Array]") -> tuple[int, ...]:
        """Of the values that it stands for; of a device's part, where it is one."""
        codes_per_item = FORMATS[self.format].codes_per_item
        return (*self.values.shape[:-1], min(self.size, self.values.shape[-1] * codes_per_item))

    @property
    def ndim(self: "Quantised[Array]") -> int:
        return self.values.ndim

    def widened(self: "Quantised[Array]", dtype: DTypeLike) -> Float[Array, "..."]:
        """The array that it stands for, in any jax program: exactly, where `dtype` has the format's values.

        What is below the smallest normal number in magnitude may be zero, as XLA has it on the machine.
        """
        format = FORMATS[self.format]
        codes = format.decode(self.values)[..., : self.shape[-1]]
        wide = codes * spread(self.scales.astype(jnp.float32), self.block, codes.shape)
        if format.value_dtype == BF16:  # XLA leaves out a conversion that another one undoes, and with it the rounding
            wide = jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
        return wide.astype(dtype)


Weight = Array | Quantised[Array]
