"""What a number format is: how a folder stores a matrix in it, and what the stored codes mean.

A value is its code times the scale of its block, in float32, then rounded to what the format's values are. A matrix is
[out, in], as Hugging Face orients them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from moonshard.models.formats.blocks import largest, num_blocks, spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor of a folder that has a part of a matrix: the ending of its name behind the module's, and its type."""

    suffix: str
    spelling: str  # of the type, as safetensors has it
    dtype: np.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format. `decode` and `encode` are of codes alone, without scales; `decode` takes numpy's arrays and jax's."""

    name: str
    values: Stored
    scales: Stored
    rows: int  # of a block of values that share a scale
    columns: int | None  # likewise; None: all
    codes_per_item: int  # along a row, in one item of `values`
    largest_code: float  # the scale is the block's largest magnitude divided by this
    value_dtype: np.dtype  # which has every value exactly
    decode: Callable[[Any], Any]  # items [..., w] -> float32 codes [..., w * codes_per_item]
    encode: Callable[[np.ndarray], np.ndarray]  # float32, in units of the scale -> items
    has_nan: Callable[[np.ndarray], bool]  # among items

    def block(self, num_columns: int) -> tuple[int, int]:
        """Rows and columns of a block in a matrix of so many columns."""
        return self.rows, self.columns or num_columns

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of the tensor `values` of a matrix."""
        return shape[0], -(-shape[1] // self.codes_per_item)

    def scales_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Of the tensor `scales` of a matrix."""
        return num_blocks(shape, self.block(shape[1]))

    def dequantise(
        self, values: np.ndarray, scales: np.ndarray, num_columns: int, block: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """The matrix that a folder's two tensors stand for, exactly, in `value_dtype`.

        A result beyond the type's largest value is infinite. `block`: along the last dimensions; None: the format's.
        """
        codes = self.decode(values)[..., :num_columns]
        with np.errstate(over="ignore"):
            wide = codes * spread(scales.astype(np.float32), block or self.block(num_columns), codes.shape)
            return wide.astype(self.value_dtype, copy=False)

    def quantise(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two tensors that stand for a matrix as nearly as the scales allow. Ties go to the even code.

        A block of zeros, or of what no scale is small enough for, has the scale 1.

        Raises:
            ValueError: a value is infinite or not a number.
        """
        wide = matrix.astype(np.float32)
        if not np.isfinite(wide).all():
            raise ValueError("a value is infinite or not a number")
        block = self.block(matrix.shape[1])
        scales = (largest(wide, block) / np.float32(self.largest_code)).astype(self.scales.dtype)
        scales[scales == 0] = 1
        return self.encode(wide / spread(scales.astype(np.float32), block, wide.shape)), scales

    def fault_of_values(self, values: np.ndarray) -> str | None:
        """What no weight can be, in words; None: nothing."""
        return "has a value that is not a number" if self.has_nan(values) else None

    def fault_of_scales(self, scales: np.ndarray) -> str | None:
        """What is no factor, in words; None: nothing."""
        wide = scales.astype(np.float32, copy=False)  # of bfloat16 each of these is slow
        for fault, is_so in (("zero", wide == 0), ("infinite", np.isinf(wide)), ("not a number", np.isnan(wide))):
            if is_so.any():
                return f"has a scale that is {fault}"
        return None


BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
