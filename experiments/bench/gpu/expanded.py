"""Attention of a long prompt, from its queries to its values: keys expanded, beside queries absorbed.

Both have their products with W_uk and W_uv, so that their times compare; each is held against its own floor.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.experiments.bench.floors.work import Work, attention_work, expanded_attention_work
from moonshard.experiments.bench.gpu.attention import over_layers
from moonshard.experiments.bench.gpu.checks import Check, poison_memory, relative_error
from moonshard.experiments.bench.gpu.rows import Bench, Row
from moonshard.experiments.bench.gpu.slice import DTYPE, ITEM_BYTES, prefill_batch
from moonshard.experiments.bench.gpu.timing import measure
from moonshard.kv.pages import Pages
from moonshard.models.gpu.attention.expanded import expanded_attention
from moonshard.models.gpu.attention.latent import latent_attention
from moonshard.models.model import ExpandedAttention
from moonshard.models.product import product
from moonshard.sharding.arrays import Array, Float, Int

TOLERANCE = 1e-2  # of the norm, in bfloat16 against float64
LAYERS_PER_CALL = 8


def check_expanded(bench: Bench, pages: Pages) -> Iterator[Check]:
    """Two sequences side by side, one with a prefix cached, both off the tiles, and a row that is padding."""
    sizes, q_tile, end = bench.sizes, bench.sizes.q_tile, max(bench.sizes.context_tokens)
    spans = ((max(0, end - 2 * q_tile - 5), end), (0, q_tile + 3), (0, 0))
    rows = [(of, start) for of, (first, stop) in enumerate(spans) for start in range(first, max(stop, 1), q_tile)]
    order = np.random.default_rng(bench.seed).permutation(sizes.num_blocks)
    tables = np.resize(order, (len(spans), sizes.blocks_per_sequence))[[of for of, _ in rows]].astype(np.int32)
    positions = np.asarray([start + np.arange(q_tile) for _, start in rows], np.int32)
    positions = np.where(positions < np.asarray([[spans[of][1]] for of, _ in rows]), positions, -1)
    queries, up, layer = _draw_queries(bench, positions.shape), _draw_up(bench), pages.shape[1] - 1
    attend = jax.jit(functools.partial(expanded_attention, scale=bench.model.softmax_scale()))
    poison_memory()
    got = attend(queries, pages, jnp.int32(layer), jnp.asarray(tables), jnp.asarray(positions), *up)
    expected = _exact(bench, queries, pages[:, layer], tables, positions, *up)
    name = "attention of prompts, expanded, kernels against float64"
    yield Check(name=name, error=relative_error(got, jnp.asarray(expected)), tolerance=TOLERANCE)


def _exact(
    bench: Bench,
    queries: Array,
    pages: Array,
    tables: np.ndarray,
    positions: np.ndarray,
    k_up: Array,
    v_up: Array,
) -> np.ndarray:
    """One row of queries at a time, on the host."""

    def wide(values: Array) -> np.ndarray:
        return np.asarray(values.astype(jnp.float32), np.float64)

    rank, scale = k_up.shape[2], bench.model.softmax_scale()
    all_queries, key_weights, value_weights = wide(queries), wide(k_up), wide(v_up)
    out = np.zeros((*queries.shape[:3], v_up.shape[1]))
    for row, own in enumerate(positions):
        if own.max() < 0:
            continue
        latents = wide(pages[tables[row]]).reshape(-1, pages.shape[-1])[: own.max() + 1]
        keys = np.einsum("sr,hkr->hsk", latents[:, :rank], key_weights, optimize=True)
        rotary = np.broadcast_to(latents[:, rank:], (len(keys), *latents[:, rank:].shape))
        scores = np.einsum("thk,hsk->hts", all_queries[row], np.concatenate([keys, rotary], axis=-1), optimize=True)
        is_seen = np.arange(len(latents)) <= np.maximum(own, 0)[:, None]
        weights = np.exp(np.where(is_seen, scores * scale, -np.inf) - (scores * scale).max(axis=-1, keepdims=True))
        values = np.einsum("sr,hvr->hsv", latents[:, :rank], value_weights, optimize=True)
        mixed = np.einsum("hts,hsv->thv", weights / weights.sum(axis=-1, keepdims=True), values, optimize=True)
        out[row] = np.where((own >= 0)[:, None, None], mixed, 0)
    return out


def expanded_rows(bench: Bench, pages: Pages) -> Iterator[Row]:
    """One layer's attention of a prompt, fresh and as the second half of a context twice as long, in either form."""
    sizes = bench.sizes
    prompt, most = sizes.prompt_tokens, sizes.blocks_per_sequence * sizes.block_size
    batch, up = prefill_batch(sizes, bench.seed), _draw_up(bench)
    queries = _draw_queries(bench, batch.positions.shape)
    for before in (0, prompt) if 2 * prompt <= most else (0,):
        spans = [(before, before + prompt)]
        forms = {
            "expanded": (expanded_attention, expanded_attention_work(bench.model, spans, ITEM_BYTES)),
            "absorbed": (_absorbed, attention_work(bench.model, spans, ITEM_BYTES)),
        }
        for form, (attend, work) in forms.items():
            work += _up_work(bench, prompt)
            run = over_layers(_bound(bench, attend, up), pages.shape[1], LAYERS_PER_CALL)
            call = functools.partial(run, queries, pages, batch.block_tables[:, 0], batch.positions + before)
            timing = measure(call, bench.effort, parts=LAYERS_PER_CALL)
            note = f"{work.num_flops / timing.median_s / 1e12:.0f} TFLOP/s"
            name = f"attention, prompt of {prompt} after {before}, from queries to values, {form}"
            yield Row(name=name, timing=timing, floor_s=work.floor_s(bench.ceilings), note=note)


def _bound(bench: Bench, attend: ExpandedAttention, up: tuple[Array, Array]):
    def run(queries: Array, pages: Pages, layer: Array, tables: Array, positions: Array) -> Array:
        return attend(queries, pages, layer, tables, positions, *up, scale=bench.model.softmax_scale())

    return run


def _absorbed(
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
    """What serves prompts where keys are not expanded."""
    nope, rank = k_up.shape[1:]
    latent = product("nthk,hkr->nthr", queries[..., :nope], k_up)
    absorbed = jnp.concatenate([latent, queries[..., nope:]], axis=-1)
    mixed = latent_attention(absorbed, pages, layer, block_tables, positions, value_rank=rank, scale=scale)
    return product("nthr,hvr->nthv", mixed, v_up)


def _up_work(bench: Bench, num_tokens: int) -> Work:
    """W_uk and W_uv, once for each token of the prompt: for its key and value, or for its query and result."""
    config = bench.model.config
    size = config.num_attention_heads * config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    return Work(num_bytes=size * ITEM_BYTES, num_flops=2 * num_tokens * size)


def _draw_queries(bench: Bench, shape: tuple[int, ...]) -> Array:
    config = bench.model.config
    features = config.qk_nope_head_dim + config.qk_rope_head_dim
    return jax.random.normal(jax.random.key(bench.seed), (*shape, config.num_attention_heads, features), DTYPE)


def _draw_up(bench: Bench) -> tuple[Array, Array]:
    config = bench.model.config
    keys = jax.random.split(jax.random.key(bench.seed + 1))
    sizes, rank = (config.qk_nope_head_dim, config.v_head_dim), config.kv_lora_rank
    one, other = (
        jax.random.normal(key, (config.num_attention_heads, size, rank), DTYPE) * jnp.asarray(rank**-0.5, DTYPE)
        for key, size in zip(keys, sizes, strict=True)
    )
    return one, other
