"""What training puts in place of pages and of the loop over experts: differentiable, and quick on two cores.

Serving does not use them: a training row holds all its keys itself, and every step runs every expert. Losses,
optimisers and data are the trainer's business. Axes are named as in `kimi`, n being rows and f the features of a key: r
of the latent, and the rotary ones. Sources: PoSE (arXiv 2309.10400), for positions with gaps; MegaBlocks (arXiv
2211.15841), for padding each expert's share to blocks.
"""

import functools

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages
from moonshard.models.experts import moe
from moonshard.models.model import Batch
from moonshard.models.product import product
from moonshard.sharding.arrays import Array, Bool, Float, Int

QUERY_BLOCK = 128  # queries that share one rectangle of keys: smaller wastes calls, larger computes what the mask drops
LONG_ROW_TOKENS = 1024  # from here on a row's softmax is computed again on the way back instead of being kept
TOKENS_PER_BLOCK = 128  # of one expert


def no_pages() -> Pages:
    """Stands in for pages where `forward` takes them and nothing is paged."""
    return jnp.zeros((0, 0, 0, 0))


def attend_causal(
    queries: Float[Array, "n t h f"],
    features: Float[Array, "n t f"],
    pages: Pages,
    layer: Int[Array, ""],
    batch: Batch,
    *,
    value_rank: int,
    scale: float,
    rows_at_once: int = 1,
) -> tuple[Float[Array, "n t h r"], Pages]:
    """Each token sees itself and the tokens before it in its row; block tables and pages are not looked at.

    What is visible is a matter of the index in the row, never of the position: positions have gaps, which teach
    distances longer than any row. So padding belongs at a row's end.

    Args:
        features: the keys; their first `value_rank` features are the values as well.
        value_rank: r, the width of the latent.
        scale: of the scores, before the softmax.
        rows_at_once: rows whose scores are held together: 1 fits a processor's cache, a GPU wants as many as it can.

    Returns:
        Of each query and head the mix of values, and the pages as they came.
    """
    one = functools.partial(_attend_row, value_rank=value_rank, scale=scale)
    if queries.shape[1] >= LONG_ROW_TOKENS:
        one = jax.checkpoint(one)
    mixed = jax.lax.map(lambda row: one(*row), (queries, features), batch_size=rows_at_once)
    return mixed, pages


def _attend_row(
    queries: Float[Array, "t h f"], keys: Float[Array, "t f"], *, value_rank: int, scale: float
) -> Float[Array, "t h r"]:
    """Triangle by blocks of queries: block i meets the keys up to its own end, and only there is anything masked."""
    return jnp.concatenate(
        [
            _attend_block(queries[start : start + QUERY_BLOCK], keys[: start + QUERY_BLOCK], start, value_rank, scale)
            for start in range(0, len(queries), QUERY_BLOCK)
        ]
    )


def _attend_block(
    queries: Float[Array, "t h f"], keys: Float[Array, "s f"], start: int, value_rank: int, scale: float
) -> Float[Array, "t h r"]:
    """Queries from the row's index `start` on, over the keys from its beginning."""
    scores = jnp.einsum("thf,sf->hts", queries, keys, preferred_element_type=jnp.float32) * scale
    visible = jnp.arange(keys.shape[0])[None, :] <= start + jnp.arange(queries.shape[0])[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hts,sr->thr", weights.astype(queries.dtype), keys[:, :value_rank])


def all_blocks(
    x: Float[Array, "t d"],
    routing: moe.Routing,
    valid: Bool[Array, "t"],
    experts: moe.Experts[Array],
    layer: Int[Array, ""],
) -> Float[Array, "t d"]:
    """`experts.moe.blocks` with all blocks in one product, not a loop: no token is dropped, and it has a gradient.

    Every block brings a copy of its expert's weights, which is little only where experts are small. In the products n
    is blocks, t the tokens of one, f an expert's width.
    """
    (t, k), num_experts = routing.experts.shape, experts.down.shape[1]
    places, block_experts, _ = moe.assign_blocks(routing.experts, valid, num_experts, TOKENS_PER_BLOCK)
    num_rows = len(block_experts) * TOKENS_PER_BLOCK
    pairs = jnp.arange(t * k, dtype=jnp.int32)
    token_of = jnp.full(num_rows, t, jnp.int32).at[places].set(pairs // k, mode="drop")
    rows = x.at[token_of].get(mode="fill", fill_value=0).reshape(len(block_experts), TOKENS_PER_BLOCK, -1)
    gate_up = jax.lax.dynamic_index_in_dim(experts.gate_up, layer, keepdims=False)[block_experts]
    down = jax.lax.dynamic_index_in_dim(experts.down, layer, keepdims=False)[block_experts]
    hidden = moe.gated(product("ntd,ngfd->ntgf", rows, gate_up))
    results = product("ntf,ndf->ntd", hidden, down).reshape(num_rows, -1)
    chosen = results.at[places].get(mode="fill", fill_value=0).reshape(t, k, -1)
    return jnp.einsum("tkd,tk->td", chosen, routing.weights.astype(x.dtype))
