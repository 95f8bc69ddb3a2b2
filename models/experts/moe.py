"""Mixture of experts: the router, and interchangeable ways to run the chosen experts. No token is ever dropped.

Backends share one signature, `Backend`. `dense` computes every expert for every token: the reference. `blocks` sorts
the (token, choice) pairs by expert, pads each expert's share to a small block and runs the blocks one after another:
work follows the pairs, whatever their balance. Expert weights stay stacked over layers, and a backend slices out only
the experts it runs: a layer's whole expert stack is never copied.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, for sigmoid routing with a selection bias; MegaBlocks
(arXiv 2211.15841) for padding to blocks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moonshard.models.product import product, taken
from moonshard.models.pytree import pytree
from moonshard.sharding.arrays import Array, Bool, Float, Int


@pytree
class Routing:
    """Which experts each token goes to. Stacked over layers where a forward pass is observed."""

    weights: Float[Array, "*layers t k"]  # float32
    experts: Int[Array, "*layers t k"]
    margin: Float[Array, "*layers t"]  # of the choice: below float error, another order of summing chooses otherwise


@pytree
class Experts[Leaf]:
    """Routed experts of all MoE layers, as Hugging Face orients them: [out, in]."""

    gate_up: Leaf  # [l e 2 f d]
    down: Leaf  # [l e d f]


Backend = Callable[
    [Float[Array, "t d"], Routing, Bool[Array, "t"], Experts[Array], Int[Array, ""]],
    Float[Array, "t d"],
]


def route(
    x: Float[Array, "t d"],
    gate: Float[Array, "e d"],
    bias: Float[Array, "e"],
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> Routing:
    """Each token's experts and their weights. The bias decides the choice, never the weight."""
    logits = product("td,ed->te", x.astype(jnp.float32), gate.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    choice, margin = scores + bias, jnp.full(x.shape[0], jnp.inf)
    if num_groups > 1:
        choice, margin = _mask_groups(choice, num_groups, top_groups)
    experts, expert_margin = _choose(choice, top_k)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return Routing(weights=weights * scale, experts=experts, margin=jnp.minimum(margin, expert_margin))


def _choose(scores: Float[Array, "t e"], count: int) -> tuple[Int[Array, "t count"], Float[Array, "t"]]:
    """The best `count`, and by how much the last of them beats the first that was left out."""
    if count == scores.shape[1]:
        return jax.lax.top_k(scores, count)[1], jnp.full(scores.shape[0], jnp.inf)
    best, indices = jax.lax.top_k(scores, count + 1)
    return indices[:, :count], best[:, count - 1] - best[:, count]


def _mask_groups(
    choice: Float[Array, "t e"], num_groups: int, top_groups: int
) -> tuple[Float[Array, "t e"], Float[Array, "t"]]:
    """Keeps the experts of the groups whose two best experts score highest together; also that choice's margin."""
    grouped = choice.reshape(choice.shape[0], num_groups, -1)
    group_scores = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    chosen, margin = _choose(group_scores, top_groups)
    is_chosen = jax.nn.one_hot(chosen, num_groups, dtype=jnp.bool_).any(axis=1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(choice.shape), margin


def gated(hidden: Float[Array, "... 2 f"]) -> Float[Array, "... f"]:
    """SwiGLU's middle: silu(gate) * up."""
    return jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]


def dense(
    x: Float[Array, "t d"], routing: Routing, valid: Bool[Array, "t"], experts: Experts[Array], layer: Int[Array, ""]
) -> Float[Array, "t d"]:
    """Every expert on every token, then the chosen ones summed. The reference."""
    gate_up, down = taken(experts.gate_up, layer), taken(experts.down, layer)
    hidden = gated(product("td,egfd->tegf", x, gate_up))
    combine = jnp.zeros((x.shape[0], down.shape[0]), jnp.float32)
    combine = combine.at[jnp.arange(x.shape[0])[:, None], routing.experts].add(routing.weights)
    combine = jnp.where(valid[:, None], combine, 0).astype(x.dtype)
    return product("tef,edf->td", hidden * combine[..., None], down)


def blocks(
    x: Float[Array, "t d"], routing: Routing, valid: Bool[Array, "t"], experts: Experts[Array], layer: Int[Array, ""]
) -> Float[Array, "t d"]:
    """Each chosen expert on its own tokens, a block of tokens at a time."""
    (t, k), num_experts = routing.experts.shape, experts.down.shape[1]
    block = block_length(t * k, num_experts)
    places, block_experts, num_used = assign_blocks(routing.experts, valid, num_experts, block)
    rows = jnp.zeros((len(block_experts) * block, x.shape[1]), x.dtype)
    rows = rows.at[places].set(jnp.repeat(x, k, axis=0), mode="drop")

    def run(index, rows):
        expert = block_experts[index]
        tokens = jax.lax.dynamic_slice_in_dim(rows, index * block, block)
        hidden = gated(product("td,gfd->tgf", tokens, taken(experts.gate_up, layer, expert)))
        result = product("tf,df->td", hidden, taken(experts.down, layer, expert))
        return jax.lax.dynamic_update_slice_in_dim(rows, result, index * block, axis=0)

    rows = jax.lax.fori_loop(0, num_used, run, rows)
    chosen = rows.at[places].get(mode="fill", fill_value=0).reshape(t, k, -1)
    return jnp.einsum("tkd,tk->td", chosen, routing.weights.astype(x.dtype))


def block_length(num_pairs: int, num_experts: int) -> int:
    """Tokens per block: about the mean share of an expert, a power of two from 8 to 128."""
    mean = max(1, num_pairs // num_experts)
    return min(128, max(8, 1 << (mean - 1).bit_length()))


def assign_blocks(
    indices: Int[Array, "t k"], valid: Bool[Array, "t"], num_experts: int, block: int
) -> tuple[Int[Array, "t*k"], Int[Array, "blocks"], Int[Array, ""]]:
    """Gives every (token, choice) pair a row, so that each block of rows belongs to one expert.

    Returns:
        The row of each pair (beyond the last row for invalid tokens); the expert of each block; how many blocks are
        used.
    """
    experts = jnp.where(valid[:, None], indices, num_experts).reshape(-1)
    is_of = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32)
    rank = jnp.take_along_axis(
        jnp.cumsum(is_of, axis=0) - 1, jnp.minimum(experts, num_experts - 1)[:, None], axis=1
    ).squeeze(1)
    num_blocks_of = -(-is_of.sum(axis=0) // block)
    first_block = jnp.cumsum(num_blocks_of) - num_blocks_of
    max_blocks = len(experts) // block + min(num_experts, len(experts))
    rows = first_block[jnp.minimum(experts, num_experts - 1)] * block + rank
    block_experts = jnp.searchsorted(jnp.cumsum(num_blocks_of), jnp.arange(max_blocks), side="right")
    return (
        jnp.where(experts < num_experts, rows, max_blocks * block),
        jnp.minimum(block_experts, num_experts - 1),
        num_blocks_of.sum(),
    )
