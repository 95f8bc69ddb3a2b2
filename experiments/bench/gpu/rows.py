"""What the GPU bench times, but for attention alone: a MoE layer, whole steps; each beside the least it could take.

One generator per question, giving a row as soon as it is measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.experiments.bench.floors.work import Ceilings, routed_work, step_work
from moonshard.experiments.bench.gpu.checks import Check, draw_routing, relative_error
from moonshard.experiments.bench.gpu.slice import (
    DTYPE,
    ITEM_BYTES,
    SliceSizes,
    Step,
    build_step,
    decode_batch,
    prefill_batch,
)
from moonshard.experiments.bench.gpu.timing import Effort, KernelTiming, measure
from moonshard.kv.pages import Pages
from moonshard.models.experts import moe
from moonshard.models.gpu.attention.expanded import expanded_attention
from moonshard.models.model import Batch, LatentModel, PagedAttention

BACKENDS_TOLERANCE = 2e-2  # of the norm, between two backends in bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    timing: KernelTiming
    floor_s: float
    note: str = ""

    @property
    def share_of_floor(self) -> float:
        """The floor's share of the measured time: 1 is as quick as the card allows."""
        return self.floor_s / self.timing.median_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Everything a measurement needs, made once."""

    sizes: SliceSizes
    loaded: Any
    ceilings: Ceilings
    effort: Effort
    seed: int

    @property
    def model(self) -> LatentModel:
        return self.sizes.model


def moe_rows(bench: Bench, num_tokens: int, backends: dict[str, moe.Backend]) -> Iterator[Row]:
    """One MoE layer's routed experts under uniform random routing: every backend on the same input."""
    x, routing = draw_tokens(bench.model, num_tokens, bench.seed)
    hit = len(np.unique(np.asarray(routing.experts)))
    work = routed_work(bench.model, num_tokens, hit, ITEM_BYTES)
    for name, backend in backends.items():
        yield Row(
            name=f"MoE layer, {num_tokens} tokens, {name}",
            timing=measure(moe_call(bench, backend, x, routing), bench.effort),
            floor_s=work.floor_s(bench.ceilings),
            note=f"{hit} of {bench.model.config.n_routed_experts} experts",
        )


def check_full_width(bench: Bench, num_tokens: int, backends: dict[str, moe.Backend]) -> Check:
    """Compares two backends on the last layer's real weights, whose offsets need more than 32 bits."""
    x, routing = draw_tokens(bench.model, num_tokens, bench.seed + 1)
    (one, first), (other, second) = tuple(backends.items())[:2]
    got, expected = (moe_call(bench, backend, x, routing)() for backend in (first, second))
    name = f"MoE at the slice's width, {num_tokens} tokens, {one} against {other}"
    return Check(name=name, error=relative_error(got, expected), tolerance=BACKENDS_TOLERANCE)


def moe_call(bench: Bench, backend: moe.Backend, x: jax.Array, routing: moe.Routing) -> Callable[[], jax.Array]:
    run = jax.jit(backend)
    valid, layer = jnp.ones(len(x), jnp.bool_), jnp.int32(bench.model.config.num_moe_layers - 1)
    return lambda: run(x, routing, valid, bench.loaded.experts, layer)


def draw_tokens(model: LatentModel, num_tokens: int, seed: int) -> tuple[jax.Array, moe.Routing]:
    first, second = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(first, (num_tokens, model.config.hidden_size), DTYPE)
    return x, draw_routing(second, num_tokens, model.config.n_routed_experts, model.config.num_experts_per_tok)


def step_rows(bench: Bench, pages: Pages, backend: moe.Backend, attention: PagedAttention | None) -> Iterator[Row]:
    """Whole steps of the slice: a prompt's chunk, its keys absorbed and expanded, then decoding at every batch and
    context. Uses up `pages`."""
    model, sizes = bench.model, bench.sizes
    layers = f"{model.config.num_hidden_layers} layers"
    chunk = prefill_batch(sizes, bench.seed)
    for form, expanded in {"absorbed": None, "expanded": expanded_attention}.items():
        step = build_step(
            model, backend, attention, last_only=True, expanded=expanded, chunk_tokens=sizes.prompt_tokens
        )
        row, pages = _step_row(bench, step, pages, chunk, [(0, sizes.prompt_tokens)], f"prefill, {layers}, {form}")
        yield row
    step = build_step(model, backend, attention, last_only=False)
    for batch in sizes.batches:
        for context in sizes.context_tokens:
            name = f"decode, {layers}, batch {batch}, context {context}"
            spans = [(context, context + 1)] * batch
            row, pages = _step_row(bench, step, pages, decode_batch(sizes, batch, context, bench.seed), spans, name)
            yield row


def _step_row(
    bench: Bench, step: Step, pages: Pages, batch: Batch, spans: list[tuple[int, int]], name: str
) -> tuple[Row, Pages]:
    hit = None

    def call() -> jax.Array:
        nonlocal pages, hit
        tokens, hit, pages = step(bench.loaded, pages, batch)
        return tokens

    timing = measure(call, bench.effort)
    experts_hit = np.asarray(hit).tolist()
    work = step_work(bench.model, spans, experts_hit, ITEM_BYTES)
    note = f"{'+'.join(str(count) for count in experts_hit)} experts, {work.whole.num_bytes / 1e9:.1f} GB"
    return Row(name=name, timing=timing, floor_s=work.floor_s(bench.ceilings), note=note), pages
