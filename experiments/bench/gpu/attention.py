"""Attention over pages, alone: right against sums in float64, and how close to the card's bandwidth and rate.

Every form that a worker may choose is compared and timed on the same inputs, at one query of a sequence and at several.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.experiments.bench.floors.work import Work, attention_work
from moonshard.experiments.bench.gpu.checks import Check, poison_memory, relative_error
from moonshard.experiments.bench.gpu.rows import Bench, Row
from moonshard.experiments.bench.gpu.slice import DTYPE, ITEM_BYTES, decode_batch, prefill_batch
from moonshard.experiments.bench.gpu.timing import measure
from moonshard.kv.pages import Pages
from moonshard.models.attention import latent_attention as by_xla
from moonshard.models.gpu import card
from moonshard.models.gpu.attention.latent import latent_attention as by_kernel
from moonshard.models.model import Batch, PagedAttention

KERNELS: Mapping[str, PagedAttention] = {
    "kernel": functools.partial(by_kernel, in_pairs=False),
    "kernel in pairs": functools.partial(by_kernel, in_pairs=True),
}
FORMS: Mapping[str, PagedAttention] = KERNELS | {"XLA": by_xla}
QUERIES = (1, 2, 4)  # of a row
TOLERANCE = 1e-2  # of the norm, in bfloat16 against float64
LAYERS_PER_CALL = 8  # so that launching hides behind running, as in a step


def served_attention() -> PagedAttention | None:
    """As a worker chooses."""
    return by_kernel if card.runs_kernels() else None


def check_attention(bench: Bench, pages: Pages) -> Iterator[Check]:
    """Rows of different lengths, one of them empty, at every number of queries, and with the heads of a shard.

    With all heads the form of the kernel that does not serve is compared, too, on the same values.
    """
    sizes, config = bench.sizes, bench.model.config
    rng = np.random.default_rng(bench.seed)
    for num_queries in QUERIES:
        for num_heads in (config.num_attention_heads, max(1, config.num_attention_heads // 8)):
            batch = decode_batch(sizes, min(4, max(sizes.batches)), max(sizes.context_tokens), bench.seed)
            lasts = rng.integers(num_queries - 1, max(sizes.context_tokens), len(batch.positions))
            positions = lasts[:, None] - num_queries + 1 + np.arange(num_queries)
            positions[-1] = np.where(len(positions) > 1, -1, positions[-1])
            shape = (*positions.shape, num_heads, config.latent_size)
            queries = jax.random.normal(jax.random.key(bench.seed + num_queries), shape, DTYPE)
            tables, layer = batch.block_tables[:, 0], pages.shape[1] - 1
            expected = _exact(bench, queries, pages[:, layer], np.asarray(tables), positions)
            forms = KERNELS if num_heads == config.num_attention_heads else {"kernel": KERNELS["kernel"]}
            for form, kernel in forms.items():
                attend = jax.jit(functools.partial(kernel, **_numbers(bench)))
                poison_memory()
                got = attend(queries, pages, jnp.int32(layer), tables, jnp.asarray(positions, jnp.int32))
                name = f"attention, {num_queries} queries, {num_heads} heads, {form} against float64"
                yield Check(name=name, error=relative_error(got, jnp.asarray(expected)), tolerance=TOLERANCE)


def _exact(bench: Bench, queries: jax.Array, pages: jax.Array, tables: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One query at a time, on the host."""
    rank, scale = bench.model.config.kv_lora_rank, bench.model.softmax_scale()
    wide = np.asarray(queries.astype(jnp.float32), np.float64)
    out = np.zeros((*wide.shape[:3], rank))
    for row, query in np.argwhere(positions >= 0):
        keys = np.asarray(pages[tables[row]].astype(jnp.float32), np.float64).reshape(-1, wide.shape[-1])
        keys = keys[: positions[row, query] + 1]
        scores = wide[row, query] @ keys.T * scale
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[row, query] = weights @ keys[:, :rank] / weights.sum(axis=-1, keepdims=True)
    return out


def attention_rows(bench: Bench, pages: Pages) -> Iterator[Row]:
    """One layer's attention, without its projections: decode at every batch and context, several queries, a prompt.

    The forms that do not serve run at the longest context only, since compiling them takes the most time.
    """
    served = {"kernel": KERNELS["kernel"]}
    sizes = bench.sizes
    for batch in sizes.batches:
        for context in sizes.context_tokens:
            step = decode_batch(sizes, batch, context, bench.seed)
            work = attention_work(bench.model, [(context, context + 1)] * batch, ITEM_BYTES)
            forms = FORMS if context == max(sizes.context_tokens) else served
            yield from _rows(bench, pages, f"attention, batch {batch}, context {context}", step, work, forms)
    batch, context = max(sizes.batches), max(sizes.context_tokens)
    for num_queries in QUERIES[1:]:
        step = decode_batch(sizes, batch, context, bench.seed)
        start = context - num_queries + 1
        positions = jnp.broadcast_to(start + jnp.arange(num_queries), (batch, num_queries))
        several = Batch(tokens=step.tokens, positions=positions, block_tables=step.block_tables)
        work = attention_work(bench.model, [(start, context + 1)] * batch, ITEM_BYTES)
        name = f"attention, batch {batch}, context {context}, {num_queries} queries"
        yield from _rows(bench, pages, name, several, work, KERNELS)
    prompt = sizes.prompt_tokens
    work = attention_work(bench.model, [(0, prompt)], ITEM_BYTES)
    yield from _rows(bench, pages, f"attention, prompt of {prompt}", prefill_batch(sizes, bench.seed), work, served)


def _rows(
    bench: Bench, pages: Pages, name: str, batch: Batch, work: Work, forms: Mapping[str, PagedAttention]
) -> Iterator[Row]:
    config = bench.model.config
    shape = (*batch.positions.shape, config.num_attention_heads, config.latent_size)
    queries = jax.random.normal(jax.random.key(bench.seed), shape, DTYPE)
    for form, attend in forms.items():
        run = over_layers(functools.partial(attend, **_numbers(bench)), pages.shape[1], LAYERS_PER_CALL)
        call = functools.partial(run, queries, pages, batch.block_tables[:, 0], batch.positions)
        timing = measure(call, bench.effort, parts=LAYERS_PER_CALL)
        gigabytes, teraflops = work.num_bytes / timing.median_s / 1e9, work.num_flops / timing.median_s / 1e12
        note = f"{gigabytes:.0f} GB/s, {teraflops:.0f} TFLOP/s"
        yield Row(name=f"{name}, {form}", timing=timing, floor_s=work.floor_s(bench.ceilings), note=note)


def over_layers(attend: Callable[..., jax.Array], num_layers: int, count: int) -> Callable[..., jax.Array]:
    """Attends to `count` layers' pages one after the other, as the layers of a step do."""

    @jax.jit
    def run(queries: jax.Array, pages: Pages, tables: jax.Array, positions: jax.Array) -> jax.Array:
        def step(number: jax.Array, queries: jax.Array) -> jax.Array:
            found = attend(queries, pages, number % num_layers, tables, positions)
            return queries + (found[..., :1] * 0).astype(queries.dtype)

        return jax.lax.fori_loop(0, count, step, queries)

    return run


def _numbers(bench: Bench) -> dict[str, Any]:
    return {"value_rank": bench.model.config.kv_lora_rank, "scale": bench.model.softmax_scale()}
