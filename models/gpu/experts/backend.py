"""The MoE backend for Hopper cards: two launches over blocks of one expert's tokens, in place of `moe.blocks`' loop.

The first makes silu(gate) * up of every block's rows, the second the down projection; expert weights are read where
they lie in the layer-stacked arrays, once per block of rows, so a decode step (few tokens per expert) streams the
chosen experts' weights and little else. Programs of unused blocks end at once. Sums are float32. It runs on one device:
on a mesh, call it inside `shard_map`. Weights in bfloat16 are `grouped_product`'s, those in INT4, FP8 and INT8
`packed_product`'s, which reads them as they are stored. It takes no float32: tensor cores multiply that as TF32, whose
10 bits are not the float32 that was asked for, and `moe.blocks` serves, 3 to 5 times slower.
`jax.lax.ragged_dot` is no way out: jax's own form masks all rows for every expert and multiplies them all
(`ragged_to_dense`), and so does XLA on NVIDIA cards (openxla/xla pull request 45996), unless a flag that is off by
default lets it find a plan of cuDNN.
Source: MegaBlocks (arXiv 2211.15841), section 5.1, for grouped products over padded blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from moonshard.models.experts import moe
from moonshard.models.formats.quantised import Quantised
from moonshard.models.gpu import card
from moonshard.models.gpu.experts.grouped_product import grouped_product
from moonshard.models.gpu.experts.packed_product import most_rows, packed_product, why_not_packed
from moonshard.models.gpu.experts.registers import ordered
from moonshard.models.gpu.experts.tiles import MAX_ROWS, Blocks, Cut
from moonshard.models.gpu.tensor_cores import Interpret
from moonshard.models.product import Weight
from moonshard.sharding.arrays import Array, Bool, Float, Int

MIN_ROWS = 16  # of a block
FEATURES = (256, 128)  # that a model's and an expert's are cut into, however a product is cut


def rows_for(num_pairs: int, num_experts: int, most: int = MAX_ROWS) -> int:
    """Blocks hold a quarter more than an expert's mean share, so that most experts' weights are read once."""
    mean = max(1, num_pairs // num_experts)
    return min(most, max(MIN_ROWS, 1 << (mean + mean // 4 - 1).bit_length()))


def grouped_experts(
    x: Float[Array, "t d"],
    routing: moe.Routing,
    valid: Bool[Array, "t"],
    experts: moe.Experts[Array],
    layer: Int[Array, ""],
) -> Float[Array, "t d"]:
    """A `moe.Backend`; `moe.blocks` serves, said once, where the kernels do not take these shapes."""
    reason = why_not(x, experts)
    if reason is None:
        return multiply(x, routing, valid, experts, layer)
    card.say_once(reason)
    return moe.blocks(x, routing, valid, experts, layer)


def why_not(x: Float[Array, "t d"], experts: moe.Experts[Array]) -> str | None:
    """What the kernels do not take about these shapes; None: they take them."""
    d, f = experts.down.shape[2:]
    packed = [each for each in (experts.gate_up, experts.down) if isinstance(each, Quantised)]
    arrays = [each for each in (x, experts.gate_up, experts.down) if not isinstance(each, Quantised)]
    dtypes = {str(array.dtype) for array in arrays}
    if dtypes != {"bfloat16"}:
        return f"experts are computed in bfloat16, not {' and '.join(sorted(dtypes))}"
    reasons = [reason for reason in map(why_not_packed, packed) if reason is not None]
    if reasons:
        return reasons[0]
    if d % FEATURES[0] or f % FEATURES[1]:
        return f"experts have {FEATURES[0]}s of features and {FEATURES[1]}s inside, not {d} and {f}"
    return None


def multiply(
    x: Float[Array, "t d"],
    routing: moe.Routing,
    valid: Bool[Array, "t"],
    experts: moe.Experts[Array],
    layer: Int[Array, ""],
    *,
    num_rows: int | None = None,
    cut: Cut | None = None,
    num_processors: int | None = None,
    interpret: Interpret = None,
) -> Float[Array, "t d"]:
    """The kernels themselves: each chosen expert on its own tokens, all blocks at once.

    Args:
        num_rows: of a block; None: as the shapes suggest.
        cut, num_processors: as for `grouped_product`.
        interpret: how to run them on a CPU; None: compile them for a card.
    """
    (t, k), num_experts = routing.experts.shape, experts.down.shape[1]
    packed = [each.format for each in (experts.gate_up, experts.down) if isinstance(each, Quantised)]
    num_rows = num_rows or rows_for(t * k, num_experts, min(map(most_rows, packed), default=MAX_ROWS))
    places, block_experts, num_used = moe.assign_blocks(routing.experts, valid, num_experts, num_rows)
    token_of_row = jnp.zeros(len(block_experts) * num_rows, jnp.int32)
    token_of_row = token_of_row.at[places].set(jnp.arange(t * k, dtype=jnp.int32) // k, mode="drop")
    where = jnp.stack([layer, num_used]).astype(jnp.int32)
    blocks = Blocks(num_rows=num_rows, experts=block_experts.astype(jnp.int32), where=where)
    how = {"cut": cut, "num_processors": num_processors, "interpret": interpret}
    rows = _ordered(x, experts.gate_up)[token_of_row]
    hidden = _product(rows, experts.gate_up, blocks, **how)
    rows = _product(_ordered(hidden, experts.down), _of_one(experts.down), blocks, **how)
    chosen = rows.at[places].get(mode="fill", fill_value=0).reshape(t, k, -1)
    return jnp.einsum("tkd,tk->td", chosen, routing.weights, preferred_element_type=jnp.float32).astype(x.dtype)


def _ordered(rows: Float[Array, "rows f"], weights: Weight) -> Float[Array, "rows f"]:
    return ordered(rows, weights.format) if isinstance(weights, Quantised) else rows


def _of_one(weights: Weight) -> Weight:
    """[l e o d] as [l e 1 o d], with its scales."""
    return jax.tree.map(lambda leaf: leaf[:, :, None], weights)


def _product(rows: Float[Array, "rows f"], weights: Weight, blocks: Blocks, **how: Any) -> Float[Array, "rows o"]:
    if isinstance(weights, Quantised):
        return packed_product(rows, weights, blocks, **how)
    return grouped_product(rows, weights, blocks, **how)
