"""The one function through which an activation meets a weight matrix, but for the kernels of routed experts.

A weight is an array or `formats.quantised.Quantised`, which is widened where it meets an activation unless a kernel
does so as it reads it: a forward pass does not change for it (the habit of jax-llm-examples).
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moonshard.models.formats.blocks import whole_block
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.quantised import Quantised, Weight
from moonshard.models.native.stacked_product import stacked_product
from moonshard.models.pytree import pytree
from moonshard.sharding.arrays import Array, Float, Int

# The most values of a weight that XLA multiplies in a copy, as float32: of a larger one the copy takes its time and
# memory. [4,096, 7,168] in bfloat16, by 192 and 512 rows on two cores with AVX2: 114 and 284 ms by the kernel, 183 and
# 330 by XLA; and one of Kimi K2's dense layer would take 1 GiB.
COPIED_VALUES = 8 << 20


@pytree
class Stacked:
    """A layer's weight where it lies in its stack, for the kernels of `models.native`, which read it there.

    XLA on CPU would copy it out first, in every step.
    """

    stack: Weight
    layer: Int[Array, ""]
    max_rows: int = dataclasses.field(metadata={"static": True})  # of activations that a kernel takes of a small weight

    def copied(self) -> Weight:
        return taken(self.stack, self.layer)


def taken(stack: Weight, *index: Int[Array, ""]) -> Weight:
    """One weight of a stack, by its place along the leading dimensions; what of them is not named stays."""

    def one(array: Array) -> Array:
        starts = (*index, *(0,) * (array.ndim - len(index)))
        found = jax.lax.dynamic_slice(array, starts, (*(1,) * len(index), *array.shape[len(index) :]))
        return found.reshape(array.shape[len(index) :])

    return jax.tree.map(one, stack)


def widened(weight: Weight, dtype: DTypeLike) -> Float[Array, "..."]:
    """The array of a weight's values in another type; one that `dtype` does not have is rounded."""
    return weight.widened(dtype) if isinstance(weight, Quantised) else weight.astype(dtype)


def product(
    equation: str,
    x: Float[Array, "..."],
    weight: Weight | Stacked,
    *,
    accumulate: DTypeLike | None = None,
    precision: jax.lax.Precision | None = None,
) -> Float[Array, "..."]:
    """`einsum(equation, x, weight)`: activations first, the weight second.

    A weight is multiplied as the matrix that it is in memory, [its own dimensions, what is summed over], wherever the
    equation names them in that order. XLA on CPU takes only matrices as they lie: of a weight with two dimensions of
    its own it would make a transposed copy in every step.

    A weight may be held as an array of another type than the activations': what is computed in is the wider one; one in
    a format is computed in theirs. `accumulate` is the type of the result; None: that of the activations. `precision`
    None: as the context says.
    """
    given, result = equation.split("->")
    of_x, of_weight = given.split(",")
    if isinstance(weight, Stacked):
        found = _in_place(of_x, of_weight, result, x, weight)
        if found is not None:
            return found.astype(accumulate or x.dtype)
        weight = weight.copied()
    if isinstance(weight, Quantised):
        weight = weight.widened(x.dtype)
    if weight.dtype != x.dtype:
        accumulate = accumulate or x.dtype
        weight = weight.astype(jnp.result_type(x, weight))
    own = "".join(name for name in of_weight if name not in of_x)
    summed = of_weight.removeprefix(own)
    is_matrix = of_x.endswith(summed) and result == of_x.removesuffix(summed) + own
    if not is_matrix:
        return jnp.einsum(equation, x, weight, preferred_element_type=accumulate, precision=precision)
    shape, num_own = (
        (*x.shape[: len(of_x) - len(summed)], *weight.shape[: len(own)]),
        math.prod(weight.shape[: len(own)]),
    )
    rows, matrix = x.reshape(-1, math.prod(weight.shape[len(own) :])), weight.reshape(num_own, -1)
    found = jnp.einsum("xs,os->xo", rows, matrix, preferred_element_type=accumulate, precision=precision)
    return found.reshape(shape)


def _in_place(
    of_x: str, of_weight: str, result: str, x: Float[Array, "..."], weight: Stacked
) -> Float[Array, "..."] | None:
    """The product in float32, by the kernel. None where the weight does not lie as it takes it, or for many rows of one
    that is small enough to be copied. Many are multiplied some at a time: each thread has its own copy of them.

    It takes [groups, own, summed], where each group (such as a head) has its own activations: [rows, groups, summed];
    and [groups, summed, own].
    """
    groups = "".join(name for name in of_weight if name in of_x and name in result)
    own = "".join(name for name in of_weight if name not in of_x)
    summed = "".join(name for name in of_weight if name in of_x and name not in result)
    rows = of_x.removesuffix(summed).removesuffix(groups)
    is_transposed = of_weight == groups + summed + own
    lies_so = is_transposed or of_weight == groups + own + summed
    lies_so = lies_so and of_x == rows + groups + summed and result == rows + groups + own
    shape_x, shape = dict(zip(of_x, x.shape, strict=True)), dict(zip(of_weight, weight.stack.shape[1:], strict=True))
    num_rows, num_groups, _, num_summed = (
        math.prod((shape | shape_x)[name] for name in names) for names in (rows, groups, own, summed)
    )
    is_copied = num_rows > weight.max_rows and math.prod(weight.stack.shape[1:]) <= COPIED_VALUES
    if not lies_so or is_copied:
        return None
    stack = _as_matrices(weight.stack, len(groups), len(summed) if is_transposed else len(own))
    if stack is None:
        return None
    rows_of_x = x.reshape(num_rows, num_groups, num_summed)
    some = [rows_of_x[first : first + weight.max_rows] for first in range(0, num_rows, weight.max_rows)]
    found = [stacked_product(each, stack, weight.layer, is_transposed=is_transposed) for each in some]
    whole = found[0] if len(found) == 1 else jnp.concatenate(found)
    return whole.reshape([(shape | shape_x)[name] for name in result])


def _as_matrices(stack: Weight, num_group_axes: int, num_row_axes: int) -> Weight | None:
    """A stack [l, groups, rows, columns], each of these one dimension instead of several, in the same memory.

    None where blocks of scales, or what several codes are packed in, would then end raggedly anywhere but at the end of
    rows or columns.
    """
    ends = (1, 1 + num_group_axes, 1 + num_group_axes + num_row_axes, stack.ndim)

    def flat(array: Array) -> Array:
        shape = array.shape
        return array.reshape(shape[0], *(math.prod(shape[a:b]) for a, b in itertools.pairwise(ends)))

    if not isinstance(stack, Quantised):
        return flat(stack)
    shape, block = stack.shape, list(whole_block(stack.ndim, stack.block))
    for begin, end in itertools.pairwise(ends[1:]):
        block[end - 1] = min(block[end - 1], shape[end - 1])
        if math.prod(shape[begin : end - 1]) > 1 and shape[end - 1] % block[end - 1]:
            return None
    if shape[-1] % FORMATS[stack.format].codes_per_item and math.prod(shape[ends[2] : -1]) > 1:
        return None
    columns = math.prod(shape[ends[2] :])
    return Quantised(flat(stack.values), flat(stack.scales), stack.format, (block[ends[2] - 1], block[-1]), columns)
