"""Multi-head latent attention over pages, expanded: keys and values of every head are made of the latents that they
came from, for as long as many queries of one sequence attend to them.

It gives what `models.attention.latent_attention` gives after its products with W_uk and W_uv, for fewer operations once
a sequence has many queries in a step (`num_queries_to_expand`). Rows that have one block table are one sequence. Its
keys are expanded a few blocks at a time, each once a step; the queries that see some of them are attended in groups, so
nothing above the diagonal is computed; softmaxes are merged as keys come, as in `models.attention`.
Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1; FlashAttention (arXiv 2205.14135), section 3.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages, read_blocks
from moonshard.models.attention import Partial
from moonshard.models.machines import XLA
from moonshard.models.product import product
from moonshard.sharding.arrays import Array, Bool, Float, Int


def num_queries_to_expand(rank: int, nope: int, value: int) -> int | None:
    """From how many queries of one sequence on expanding its keys is less work than attending to the latents.

    A key costs each head, in multiplications, `rank * (nope + value)` once to be expanded and `nope + rope + value` for
    each query; unexpanded `2 * rank + rope` for each query. What queries and results cost besides (W_uk and W_uv, once
    each) is the same for a query as for a key. None: it never is.
    """
    saved = 2 * rank - nope - value
    return -(-rank * (nope + value) // saved) if saved > 0 else None


def expanded_attention(
    queries: Float[Array, "n t h k"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    k_up: Float[Array, "h nope r"],
    v_up: Float[Array, "h v r"],
    *,
    scale: float,
    keys_per_step: int = XLA.expanded_keys,
    queries_per_step: int = XLA.expanded_queries,
) -> Float[Array, "n t h v"]:
    """Attention of queries as they are, `[q_nope | q_rope]`, over the paged latents.

    Args:
        positions: absolute position of each query; a query sees keys at positions up to its own. Below 0: padding,
            whose result is zero.
        k_up, v_up: what makes keys (but for their rotary part, which is in the pages) and values of latents.
        keys_per_step: tokens that are expanded at once.
        queries_per_step: query positions that attend to them at once.

    Returns:
        The values of each head, in the queries' dtype.
    """
    n, t, h, _ = queries.shape
    rows_per_group = max(1, min(queries_per_step // t, n))
    missing, num_groups = -n % rows_per_group, -(-n // rows_per_group)
    tables = jnp.pad(block_tables, ((0, missing), (0, 0)))
    positions = jnp.pad(positions, ((0, missing), (0, 0)), constant_values=-1)
    is_new = jnp.any(tables[1:] != tables[:-1], axis=1)
    sequence_of = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(is_new, dtype=jnp.int32)])  # of each row
    num_keys = jax.ops.segment_max(positions.max(axis=1) + 1, sequence_of, num_segments=len(tables))
    first_row = jnp.searchsorted(sequence_of, jnp.arange(len(tables)))

    def grouped(of_rows: Array) -> Array:
        return of_rows.reshape(num_groups, rows_per_group * t, *of_rows.shape[2:])

    padded = jnp.pad(queries, ((0, missing), (0, 0), (0, 0), (0, 0)))
    groups = _Groups(
        queries=grouped(padded).swapaxes(1, 2),
        positions=grouped(positions),
        sequence=grouped(jnp.broadcast_to(sequence_of[:, None], positions.shape)),
    )

    def attend_sequence(sequence: Int[Array, ""], found: Partial) -> Partial:
        table = tables[first_row[sequence]]
        return _attend(
            groups, found, pages, layer, table, sequence, num_keys[sequence], k_up, v_up, scale, keys_per_step
        )

    shape = (num_groups, h, rows_per_group * t)
    nothing = Partial.of_no_keys(shape, v_up.shape[1])
    values = jax.lax.fori_loop(0, sequence_of[-1] + 1, attend_sequence, nothing).values()
    return values.swapaxes(1, 2).reshape(-1, t, h, v_up.shape[1])[:n].astype(queries.dtype)


class _Groups(NamedTuple):
    """Queries in groups of some rows, whichever sequences these are of."""

    queries: Float[Array, "groups h q k"]
    positions: Int[Array, "groups q"]
    sequence: Int[Array, "groups q"]


def _attend(
    groups: _Groups,
    found: Partial,
    pages: Pages,
    layer: Int[Array, ""],
    table: Int[Array, "m"],
    sequence: Int[Array, ""],
    num_keys: Int[Array, ""],
    k_up: Float[Array, "h nope r"],
    v_up: Float[Array, "h v r"],
    scale: float,
    keys_per_step: int,
) -> Partial:
    """One sequence's queries over all of its keys."""
    block_size, num_groups = pages.shape[2], len(groups.positions)
    num_blocks = max(1, min(keys_per_step // block_size, len(table)))
    num_expanded = num_blocks * block_size
    table = jnp.pad(table, (0, -len(table) % num_blocks))
    positions = jnp.where(groups.sequence == sequence, groups.positions, -1)

    def step(index: Int[Array, ""], found: Partial) -> Partial:
        blocks = jax.lax.dynamic_slice_in_dim(table, index * num_blocks, num_blocks)
        first = index * num_expanded
        keys, values = _expand(read_blocks(pages, layer, blocks[None])[0], first, num_keys, k_up, v_up)
        sees = positions.max(axis=1) >= first
        order = jnp.nonzero(sees, size=num_groups, fill_value=0)[0]

        def attend_group(place: Int[Array, ""], found: Partial) -> Partial:
            group = order[place]
            is_seen = first + jnp.arange(num_expanded) <= positions[group][:, None]
            now = _merge(
                jax.tree.map(lambda part: part[group], found), groups.queries[group], keys, values, is_seen, scale
            )
            return jax.tree.map(lambda part, own: part.at[group].set(own), found, now)

        return jax.lax.fori_loop(0, sees.sum(), attend_group, found)

    return jax.lax.fori_loop(0, (num_keys + num_expanded - 1) // num_expanded, step, found)


def _expand(
    latents: Float[Array, "s f"],
    first: Int[Array, ""],
    num_keys: Int[Array, ""],
    k_up: Float[Array, "h nope r"],
    v_up: Float[Array, "h v r"],
) -> tuple[Float[Array, "h s k"], Float[Array, "h s v"]]:
    """Keys and values of consecutive tokens; zeros beyond the sequence's last, whatever lies there."""
    is_there = first + jnp.arange(len(latents)) < num_keys
    latents = jnp.where(is_there[:, None], latents, 0).astype(k_up.dtype)
    rank = k_up.shape[2]
    keys = product("sr,hkr->shk", latents[:, :rank], k_up).swapaxes(0, 1)
    values = product("sr,hvr->shv", latents[:, :rank], v_up).swapaxes(0, 1)
    rotated = jnp.broadcast_to(latents[:, rank:], (len(keys), *latents[:, rank:].shape))
    return jnp.concatenate([keys, rotated], axis=-1), values


def _merge(
    found: Partial,  # of one group
    queries: Float[Array, "h q k"],
    keys: Float[Array, "h s k"],
    values: Float[Array, "h s v"],
    is_seen: Bool[Array, "q s"],
    scale: float,
) -> Partial:
    scores = jnp.einsum("hqk,hsk->hqs", queries, keys, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(is_seen, scores, -jnp.inf)

    def mix(weights: Float[Array, "h q s"]) -> Float[Array, "h q v"]:
        return jnp.einsum("hqs,hsv->hqv", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

    return found.with_keys(scores, mix)
