"""Packed weights in a warpgroup's registers: loaded as they lie in shared memory, unpacked to bfloat16 for wgmma.

A thread loads whole words of 32 bits, each of codes that follow one another along the summed features. It makes pairs
of bfloat16 of a word without any other thread, by three or four instructions a pair; so the summed features come in
another order than in memory, and activations are put into the same (`ordered`). A code is put into the mantissa of a
number whose exponent makes it count in units, or its exponent into the exponent's place, and what that adds is taken
away. Where a kernel is interpreted, the arithmetic is the same, and the order is made by hand.
Sources: PTX ISA, "Register fragments for wgmma.mma_async"; Kim et al., arXiv 2211.10017, for codes in a mantissa.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from moonshard.models.formats.int4 import INT4
from moonshard.models.formats.known import FORMATS
from moonshard.models.gpu.tensor_cores import WIDE, Interpret
from moonshard.sharding.arrays import Array, Float, Num

LANES = 4  # threads that share a row of a fragment
SIGNS = -0x7FFF8000  # the uppermost bits of both halves of a word
GROUP = INT4.columns or 1  # values that share a scale of int4


@dataclass(frozen=True, slots=True)
class Packing:
    """How a word of a format becomes pairs of bfloat16."""

    codes: int  # of a word
    layout: Any  # a word, or what makes one, in each thread: four threads have neighbours of a row
    pairs: Callable[[Any, int, Callable[[Any], Any]], Any]  # (words, which pair, as pairs of bfloat16) -> numbers

    @property
    def num_pairs(self) -> int:
        return self.codes // 2


def _int4(words: Any, which: int, as_pairs: Callable[[Any], Any]) -> Any:
    """Codes `which` and `which` + 4, offset binary, in the mantissas of 128 + code."""
    return as_pairs((words >> 4 * which) & 0x000F000F | 0x43004300) - 136


def _fp8(words: Any, which: int, as_pairs: Callable[[Any], Any]) -> Any:
    """Codes `which` and `which` + 2: sign, exponent and mantissa to their places, and the exponents' biases made equal.

    Subnormal codes are subnormal before they are scaled, which bfloat16 products keep.
    """
    words = words << 8 if which == 0 else words
    return as_pairs((words >> 4) & 0x07F007F0 | words & SIGNS) * 2.0**120


def _int8(words: Any, which: int, as_pairs: Callable[[Any], Any]) -> Any:
    """Codes `which` and `which` + 2, two's complement: 128 + its low bits, less 256 for a sign, else less 128."""
    words = words >> 8 if which == 1 else words
    return as_pairs(words & 0x007F007F | 0x43004300) - as_pairs(words & 0x00800080 | 0x43004300)


def _words(codes: int) -> Any:
    """`codes` neighbours of a row in each thread; threads and rows as in a fragment of the left side of wgmma."""
    width = LANES * codes
    tiling = plgpu.Tiling(((64, width), (16, width), (8, width), (codes,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


WORDS = _words(1)
PACKINGS = {
    "int4": Packing(codes=8, layout=WORDS, pairs=_int4),
    "fp8": Packing(codes=4, layout=_words(4), pairs=_fp8),
    "int8": Packing(codes=4, layout=_words(4), pairs=_int8),
}


def ordered(values: Float[Array, "... f"], format: str) -> Float[Array, "... f"]:
    """Summed features in the order in which weights of a format are unpacked.

    Of four words of a row the first pair of each comes first, then the second of each: a word's pair is the codes of
    that number in its two halves.
    """
    packing = PACKINGS[format]
    split = values.reshape(*values.shape[:-1], -1, LANES, 2, packing.num_pairs)
    return jnp.moveaxis(split, -1, -3).reshape(values.shape)


def unpacked(values: Num[Array, "rows w"], format: str, interpret: Interpret) -> Float[Array, "rows f"]:
    """Codes as numbers, exactly, laid out as wgmma's left side and `ordered`; 64 rows."""
    packing = PACKINGS[format]
    if interpret is not None:
        return _unpacked_as_is(values, packing)
    num_features = values.shape[1] * FORMATS[format].codes_per_item
    shape = plgpu.ShapeDtypeStruct((len(values), num_features), jnp.dtype(jnp.bfloat16), layout=WIDE)
    run: Any = plgpu.inline_mgpu(arg_types=(packing.layout,), return_type=shape)(functools.partial(_unpack, packing))
    return run(values)


def _unpack(packing: Packing, _: Any, values: Any) -> Any:
    words = _recast(values, mosaic.utils.dtype_to_ir_type(jnp.dtype(jnp.int32)), WORDS.to_mgpu())
    numbers = [packing.pairs(words, which, _as_pairs) for which in range(packing.num_pairs)]
    return _array(interleaved([each.registers for each in numbers]), mosaic.WGMMA_LAYOUT)


def interleaved(pairs: Sequence[np.ndarray]) -> np.ndarray:
    """Registers of all pairs of words, as a fragment has them: all pairs of the same four words follow one another."""
    registers = np.stack(pairs, axis=2)
    return registers.reshape(registers.shape[0], -1, *registers.shape[3:])


def _unpacked_as_is(values: Num[Array, "rows w"], packing: Packing) -> Float[Array, "rows f"]:
    """By the same arithmetic, and put into the order by hand."""
    if values.dtype != jnp.int32:
        values = values.reshape(len(values), -1, packing.codes)
    words = jax.lax.bitcast_convert_type(values, jnp.int32)
    pairs = [
        packing.pairs(words, which, lambda words: jax.lax.bitcast_convert_type(words, jnp.bfloat16))
        for which in range(packing.num_pairs)
    ]
    return jnp.stack([each.reshape(len(words), -1, LANES, 2) for each in pairs], axis=2).reshape(len(words), -1)


def _as_pairs(words: Any) -> Any:
    return _recast(words, mosaic.utils.dtype_to_ir_type(jnp.dtype(jnp.bfloat16)), mosaic.WGMMA_LAYOUT)


def _recast(array: Any, dtype: Any, layout: Any) -> Any:
    """The same registers, of 32 bits each, taken for others."""
    width = 32 // mosaic.utils.bitwidth(dtype)
    vector = ir.VectorType.get((width,), dtype)
    registers = np.empty_like(array.registers)
    for index, register in np.ndenumerate(array.registers):
        registers[index] = mosaic.utils.bitcast(register, vector)
    return _array(registers, layout, is_signed=True if width == 1 else None)


def _array(registers: np.ndarray, layout: Any, *, is_signed: bool | None = None) -> Any:
    return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def scales_layout(num_groups: int) -> Any:
    """All of a row's scales in each of the threads that share the row."""
    tiling = plgpu.Tiling(((64, num_groups), (16, num_groups), (8, num_groups)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-2, plgpu.Replicated(LANES)), vector_dim=-1)


def spread(scales: Float[Array, "rows groups"], interpret: Interpret) -> Float[Array, "rows f"]:
    """Each scale at every value of its group, laid out as `unpacked` has them; 64 rows."""
    num_rows, num_groups = scales.shape
    if interpret is not None:
        return jnp.repeat(scales, GROUP, axis=1)
    result = plgpu.ShapeDtypeStruct((num_rows, num_groups * GROUP), scales.dtype, layout=WIDE)

    run: Any = plgpu.inline_mgpu(arg_types=(scales_layout(num_groups),), return_type=result)(_spread)
    return run(scales)


def _spread(_: Any, scales: Any) -> Any:
    shape = (scales.shape[0], scales.shape[1] * GROUP)
    registers = np.empty(mosaic.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    for index in np.ndindex(registers.shape):
        row, group = scale_of(index)
        one = mosaic.utils.vector_slice(scales.registers[row], slice(group, group + 1))
        registers[index] = mosaic.utils.vector_concat([one, one])
    return _array(registers, mosaic.WGMMA_LAYOUT)


def scale_of(index: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """For a fragment's register, which has two of 8 columns of a row: the register of that row's scales, and which."""
    rows, eighth, _, _, half, *_ = index
    return (rows, 0, 0, 0, half, 0, 0, 0), eighth * 8 // GROUP
