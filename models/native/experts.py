"""The MoE backend for CPUs: each chosen expert's weights are read once, where they lie, by all tokens that chose it.

It takes the place of `moe.blocks`, which is its reference. One call first makes silu(gate) * up of every (token,
choice) pair, sorted by expert, then adds up the down projections, weighted, in the order of the experts: a token's
result is the same in whatever batch and on however many threads. Sums are float32.
"""

import jax
import jax.numpy as jnp

from moonshard.models.experts import moe
from moonshard.models.native.library import target
from moonshard.models.native.weights import operands
from moonshard.sharding.arrays import Array, Bool, Float, Int

BLOCK = 32  # `block_columns` of csrc/experts.h


def grouped_experts(
    x: Float[Array, "t d"],
    routing: moe.Routing,
    valid: Bool[Array, "t"],
    experts: moe.Experts[Array],
    layer: Int[Array, ""],
    *,
    form: str | None = None,
) -> Float[Array, "t d"]:
    """A `moe.Backend`. An invalid token's result is zero. Weights are float32, bfloat16, or in a format; where both
    have not the same, XLA computes.

    Args:
        form: the instruction set; None: the best that there is.

    Raises:
        LibraryError: no library, or no such form.
    """
    gate_up, down = operands(experts.gate_up), operands(experts.down)
    if gate_up.values.dtype != down.values.dtype:
        return moe.blocks(x, routing, valid, experts, layer)
    (t, k), (d, f) = routing.experts.shape, experts.down.shape[2:]
    shapes = ((t, d), (t, _whole(d)), (t * k, _whole(f)))  # the result, and room: for x and between the two products
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    result, _, _ = jax.ffi.ffi_call(target("experts", form), given)(
        x.astype(jnp.float32),
        routing.experts.astype(jnp.int32),
        routing.weights.astype(jnp.float32),
        valid,
        gate_up.values,
        gate_up.scales,
        down.values,
        down.scales,
        layer.astype(jnp.int32),
        gate_up_rows=gate_up.block_rows,
        gate_up_columns=gate_up.block_columns,
        down_rows=down.block_rows,
        down_columns=down.block_columns,
    )
    return result.astype(x.dtype)


def _whole(count: int) -> int:
    """As many as whole blocks take: the kernel puts activations into an order of its own, a block at a time."""
    return -(-count // BLOCK) * BLOCK
