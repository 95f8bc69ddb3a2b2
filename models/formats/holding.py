"""What each weight is held in, by what its folder stores and by what was asked for."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.models.formats.format import BF16, F32, Format
from moonshard.models.formats.int8 import INT8
from moonshard.models.formats.layout import Layout
from moonshard.models.formats.stored import TensorSource, format_of
from moonshard.models.spec import Param

# How matrices lie in memory, which are nearly all of the bytes. `native`: as they are stored, unless that is an array
# wider than what is computed in; `float32` and `bf16`: as arrays, whatever is stored; `int8`: in that format what only
# products take, the rest as `native`; `computed`: as arrays of what is computed in. None: likewise, but what is stored
# in a format stays in it, as suits whoever has no kernels that widen arrays.
Holding = Literal["native", "float32", "bf16", "int8", "computed"]


def held(param: Param, source: TensorSource, computed: np.dtype, holding: Holding | None) -> np.dtype | Format:
    """What a parameter is held in: an array of a type, or a format.

    Of tensors that are stored differently and stacked, or whose view goes through what is packed, the values are held
    as an array.
    """
    if param.dtype is not None or len(param.whole_tensor) < 2:
        return jnp.dtype(param.dtype or computed)
    if param.is_factor and holding == "int8":
        return INT8
    if holding in ("float32", "bf16"):
        return F32 if holding == "float32" else BF16
    if param.is_factor and holding != "computed" and (format := _format_of_all(param, source)) is not None:
        return format
    is_bf16 = holding in ("native", "int8") and all(_value_dtype(source, name) == BF16 for name in param.tensors())
    return BF16 if is_bf16 else computed


def _format_of_all(param: Param, source: TensorSource) -> Format | None:
    """What all tensors of a parameter are stored in; None where a leaf of it would not have whole items either."""
    formats = {format_of(source, name) for name in param.tensors()}
    format = formats.pop() if len(formats) == 1 else None
    if format is None or Layout.of(format, matrix_of(param), param.view, (1,) * param.num_own) is None:
        return None
    return format


def matrix_of(param: Param) -> tuple[int, int]:
    """Rows and columns of a parameter's tensors, which are matrices."""
    rows, columns = param.whole_tensor
    return rows, columns


def _value_dtype(source: TensorSource, name: str) -> np.dtype:
    format = format_of(source, name)
    return source.tensor(name).dtype if format is None else format.value_dtype


def is_lossy(params: Any, source: TensorSource, computed: str, holding: Holding | None) -> bool:
    """Whether some matrix is held with other values than as it is stored, arrays to less than what is computed in."""
    target = jnp.dtype(computed)

    def changes(param: Param) -> bool:
        own = held(param, source, target, holding)
        if isinstance(own, Format):
            return any(format_of(source, name) is not own for name in param.tensors())
        if own != BF16 or len(param.whole_tensor) < 2:
            return False
        as_stored = held(param, source, target, "native")  # whose values kernels have exactly, whatever is computed in
        is_narrower = target != BF16 if not isinstance(as_stored, Format) else as_stored.value_dtype != BF16
        return is_narrower and any(_value_dtype(source, name) != BF16 for name in param.tensors())

    return any(map(changes, jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Param))))
