"""How many bytes a parameter takes in what it is held in, from its declaration alone."""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from moonshard.models.formats.format import BF16, Format
from moonshard.models.formats.fp8 import FP8
from moonshard.models.formats.holding import held, matrix_of
from moonshard.models.formats.int4 import INT4
from moonshard.models.formats.int8 import INT8
from moonshard.models.formats.layout import Layout
from moonshard.models.formats.stored import TensorSource
from moonshard.models.spec import Param, WeightFormat

Held = Callable[[Param], np.dtype | Format]  # what each parameter is held in
EXPERTS = "experts"  # the axis that only routed experts have


def held_in(weight_format: WeightFormat) -> Held:
    """As a folder in this format has it: what only products take is in the format, the rest in bf16."""
    format = {"bf16": None, "fp8": FP8, "int8": INT8, "int4-experts": INT4}[weight_format]

    def own(param: Param) -> np.dtype | Format:
        is_in_format = param.is_factor and (format is not INT4 or EXPERTS in param.axes)
        return format if format is not None and is_in_format else jnp.dtype(param.dtype or BF16)

    return own


def held_as_stored(source: TensorSource) -> Held:
    """As a worker that computes in bf16 holds the weights of a folder, with its values."""
    return lambda param: held(param, source, BF16, "native")


def bits(param: Param, own: np.dtype | Format) -> float:
    """Of one value, scales included, where no mesh cuts blocks."""
    if not isinstance(own, Format):
        return 8.0 * own.itemsize
    layout = Layout.of(own, matrix_of(param), param.view, (1,) * param.num_own)
    if layout is None:  # a view that goes through an item is held as an array
        return 8.0 * own.value_dtype.itemsize
    num_bytes = math.prod(layout.values_shape) * own.values.dtype.itemsize
    num_bytes += math.prod(layout.scales_shape) * own.scales.dtype.itemsize
    return 8 * num_bytes / math.prod(layout.shape)


def values_together(own: np.dtype | Format) -> int:
    """How many values along the last dimension no mesh may part."""
    return own.codes_per_item if isinstance(own, Format) else 1
