"""Latent attention of long prompts for Hopper cards: keys and values are expanded, a panel at a time, then attended to.

It takes the place of `models.expanded_attention.expanded_attention`, its reference: a prompt of 2,048 tokens needs two
fifths of the products of the absorbed form. No loop is waited for where one panel holds the keys of all sequences; else
panels follow one another in a loop whose length the card knows.
Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1; FlashAttention-3 (arXiv 2407.08608).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages
from moonshard.models import expanded_attention as reference
from moonshard.models.gpu import card
from moonshard.models.gpu.attention.expanded_keys import KEYS, expand_panel, row_of
from moonshard.models.gpu.attention.expanded_queries import TILE, seen_by
from moonshard.models.gpu.attention.expanded_tiles import Sizes, attend_panel
from moonshard.models.gpu.tensor_cores import Interpret
from moonshard.sharding.arrays import Array, Float, Int

FEATURES = 64  # that a row of shared memory holds, side by side for the tensor cores
COLUMNS = 256  # that keys and values of all heads are expanded in tiles of
SHARED_BYTES = 227 * 1024 - 512  # of a multiprocessor, less what barriers take


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
) -> Float[Array, "n t h v"]:
    """As the reference, which serves, said once, where the kernels do not take these shapes."""
    given = (queries, pages, layer, block_tables, positions, k_up, v_up)
    reason = why_not(queries, pages, k_up, v_up)
    if reason is None:
        return attend(*given, scale=scale)
    card.say_once(reason)
    return reference.expanded_attention(*given, scale=scale)


def why_not(
    queries: Float[Array, "n t h k"], pages: Pages, k_up: Float[Array, "h nope r"], v_up: Float[Array, "h v r"]
) -> str | None:
    """What the kernels do not take about these shapes; None: they take them."""
    dtypes = {str(array.dtype) for array in (queries, pages, k_up, v_up)}
    if dtypes != {"bfloat16"}:
        return f"expanded attention computes in bfloat16, not {' and '.join(sorted(dtypes))}"
    sizes = _sizes(queries, k_up, v_up)
    if any(size % FEATURES for size in sizes[1:]) or sizes.value != sizes.nope:
        return f"expanded attention takes heads of {FEATURES}s of features, as many of values as of keys, not {sizes}"
    if sizes.num_heads * sizes.nope % COLUMNS or sizes.num_heads * sizes.value % COLUMNS:
        return f"expanded attention takes keys and values of {COLUMNS}s of features in all, not {sizes}"
    if sizes.shared_bytes > SHARED_BYTES:
        return f"expanded attention has no room for {sizes}"
    return None


def _sizes(queries: Float[Array, "n t h k"], k_up: Float[Array, "h nope r"], v_up: Float[Array, "h v r"]) -> Sizes:
    num_heads, nope, rank = k_up.shape
    return Sizes(num_heads=num_heads, nope=nope, rope=queries.shape[3] - nope, value=v_up.shape[1], rank=rank)


def attend(
    queries: Float[Array, "n t h k"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    k_up: Float[Array, "h nope r"],
    v_up: Float[Array, "h v r"],
    *,
    scale: float,
    panel_blocks: int | None = None,
    num_processors: int | None = None,
    interpret: Interpret = None,
) -> Float[Array, "n t h v"]:
    """The kernels themselves.

    Args:
        panel_blocks: that are expanded at once; None: as many as `card.PANEL_BYTES` hold.
        num_processors: that expand; None: all of the card.
        interpret: how to run them on a CPU; None: compile them for a card.
    """
    (n, t, h, _), sizes = queries.shape, _sizes(queries, k_up, v_up)
    row = row_of(block_tables.astype(jnp.int32), positions.astype(jnp.int32))
    seen = seen_by(row)
    flat = jnp.pad(queries.reshape(n * t, -1), ((0, -(n * t) % TILE), (0, 0)))
    most = n * -(-block_tables.shape[1] * pages.shape[2] // KEYS)
    if panel_blocks is None:
        panel_blocks = max(1, card.PANEL_BYTES // (2 * KEYS * h * (sizes.nope + sizes.value)))
    num_blocks = min(panel_blocks, most)

    def attend_to(index: Int[Array, ""], found: Sequence[Any] | None) -> Sequence[Array]:
        how = {"num_processors": num_processors, "interpret": interpret}
        panel = expand_panel(row, index, num_blocks, pages, layer, k_up, v_up, **how)
        how = {"is_only": num_blocks == most, "sizes": sizes, "scale": scale, "interpret": interpret}
        return attend_panel(flat, panel, seen, index, found, **how)

    found, *state = attend_to(jnp.int32(0), None)
    if state:
        num_panels = (row.num_blocks + (num_blocks - 1)) // num_blocks
        found = _attend_to_others(attend_to, num_panels, [found, *state])
    return found[: n * t].reshape(n, t, h, sizes.value)


def _attend_to_others(
    attend_to: Callable[[Array, Sequence[Any]], Any], num_panels: Int[Array, ""], found: list[Array]
) -> Float[Array, "q h_v"]:
    """What all panels give, after the first. A `cond` asks whether there are others: the host does not wait for it."""

    def go_on(found: list[Array]) -> Array:
        places = [jax.new_ref(each) for each in found]

        def step(index: Int[Array, ""], _: None) -> None:
            attend_to(index, places)

        jax.lax.fori_loop(1, num_panels, step, None)
        return jax.freeze(places[0])

    return jax.lax.cond(num_panels > 1, go_on, lambda found: found[0], found)
