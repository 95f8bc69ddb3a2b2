"""Routed experts in INT4 and FP8, as folders have them, on a card: right first, then each against its own bytes.

Codes and scales are drawn at random on the device, one layer in one format at a time, before the slice takes its room.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.experiments.bench.floors.work import routed_work
from moonshard.experiments.bench.gpu.checks import Check, MoeCase, draw_routing, poison_memory, relative_error
from moonshard.experiments.bench.gpu.rows import BACKENDS_TOLERANCE, Bench, Row, draw_tokens
from moonshard.experiments.bench.gpu.timing import measure
from moonshard.models.experts import moe
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.quantised import Quantised
from moonshard.models.model import LatentModel
from moonshard.sharding.arrays import Array

TIMED = ("int4", "fp8")  # that folders on the hub have
SUM_TOLERANCE = 1e-2  # of the norm, against float32 sums of the same values
SPREAD = {"int4": 4.6, "fp8": 103.0, "int8": 74.0}  # of codes drawn as here: a scale divides by it


def check_packed_sums(backend: moe.Backend, cases: tuple[MoeCase, ...], seed: int) -> Iterator[Check]:
    """A backend's sums with weights in each format, against `moe.dense` in float32 on the values they stand for."""
    for number, case in enumerate(cases):
        for format in FORMATS:
            error = _sum_error(backend, case, format, jax.random.key(seed + number))
            name = f"MoE {case.num_tokens} x {case.embed} x {case.ffw}, {case.num_experts} experts, {format}"
            yield Check(name=name, error=error, tolerance=SUM_TOLERANCE)


def _sum_error(backend: moe.Backend, case: MoeCase, format: str, key: jax.Array) -> float:
    keys = jax.random.split(key, 3)
    e, d, f, layers = case.num_experts, case.embed, case.ffw, 2
    x = jax.random.normal(keys[0], (case.num_tokens, d), jnp.bfloat16)
    experts = _draw_experts((layers, e, 2, f, d), format, keys[1])
    valid, layer = jnp.arange(case.num_tokens) % 7 != 3, jnp.int32(layers - 1)
    routing = draw_routing(keys[2], case.num_tokens, e, case.top_k)
    wide = moe.Experts(gate_up=experts.gate_up.widened(jnp.float32), down=experts.down.widened(jnp.float32))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(moe.dense)(x.astype(jnp.float32), routing, valid, wide, layer)
    run = jax.jit(backend).lower(x, routing, valid, experts, layer).compile()
    poison_memory()
    return relative_error(run(x, routing, valid, experts, layer), expected)


def check_packed_width(bench: Bench, counts: Sequence[int], backends: Mapping[str, moe.Backend]) -> Iterator[Check]:
    """Compares two backends on one layer of the slice's width in each format that is timed, for counts of tokens."""
    (one, first), (other, second) = tuple(backends.items())[:2]
    for format in TIMED:
        experts = draw_layer(bench.model, format, bench.seed)
        for num_tokens in counts:
            x, routing = draw_tokens(bench.model, num_tokens, bench.seed + 1)
            got, expected = (_call(backend, x, routing, experts)() for backend in (first, second))
            name = f"MoE in {format} at the slice's width, {num_tokens} tokens, {one} against {other}"
            yield Check(name=name, error=relative_error(got, expected), tolerance=BACKENDS_TOLERANCE)
        del experts  # before the next is drawn


def packed_rows(bench: Bench, backend: moe.Backend, name: str) -> Iterator[Row]:
    """One MoE layer's routed experts in each format, at every batch and for a prompt."""
    for format in TIMED:
        experts = draw_layer(bench.model, format, bench.seed)
        for num_tokens in (*bench.sizes.batches, bench.sizes.prompt_tokens):
            x, routing = draw_tokens(bench.model, num_tokens, bench.seed)
            hit = len(np.unique(np.asarray(routing.experts)))
            work = routed_work(bench.model, num_tokens, hit, _item_bytes(experts))
            yield Row(
                name=f"MoE layer in {format}, {num_tokens} tokens, {name}",
                timing=measure(_call(backend, x, routing, experts), bench.effort),
                floor_s=work.floor_s(bench.ceilings),
                note=f"{hit} of {bench.model.config.n_routed_experts} experts",
            )
        del experts  # before the next is drawn


def _call(
    backend: moe.Backend, x: jax.Array, routing: moe.Routing, experts: moe.Experts[Quantised[Array]]
) -> Callable[[], jax.Array]:
    run, valid = jax.jit(backend), jnp.ones(len(x), jnp.bool_)
    return lambda: run(x, routing, valid, experts, jnp.int32(0))


def _item_bytes(experts: moe.Experts[Quantised[Array]]) -> float:
    """Of a weight, with its share of a scale."""
    gate_up = experts.gate_up
    return (gate_up.values.nbytes + gate_up.scales.nbytes) / math.prod(gate_up.shape)


def draw_layer(model: LatentModel, format: str, seed: int) -> moe.Experts[Quantised[Array]]:
    """One MoE layer of a model."""
    declared = model.declare().experts
    if declared is None:
        raise ValueError("a slice without MoE layers has nothing to measure")
    return _draw_experts((1, *declared.gate_up.shape[1:]), format, jax.random.key(seed))


def _draw_experts(shape: tuple[int, ...], format: str, key: jax.Array) -> moe.Experts[Quantised[Array]]:
    """Of gate and up [l e 2 f d], and what goes with them."""
    layers, num_experts, _, f, d = shape
    keys = jax.random.split(key)
    return moe.Experts(gate_up=_draw(shape, format, keys[0]), down=_draw((layers, num_experts, d, f), format, keys[1]))


def _draw(shape: tuple[int, ...], format: str, key: jax.Array) -> Quantised[Array]:
    form, (*leading, num_own, depth) = FORMATS[format], shape
    values_shape = (*leading, *form.stored_shape((num_own, depth)))
    scales_shape = (*leading, *form.scales_shape((num_own, depth)))
    keys = jax.random.split(key)
    values = jax.jit(_draw_codes, static_argnums=(0, 1))(values_shape, format, keys[0])
    factors = jax.random.uniform(keys[1], scales_shape, minval=0.5, maxval=1.5) * depth**-0.5 / SPREAD[format]
    return Quantised(values, factors.astype(form.scales.dtype), format, form.block(depth), depth)


def _draw_codes(shape: tuple[int, ...], format: str, key: jax.Array) -> jax.Array:
    """[l, e, ...] of any codes that are numbers, one expert at a time into the final array."""
    num_layers, num_experts, *matrix = shape
    dtype = FORMATS[format].values.dtype

    def draw(index, drawn):
        bits = jax.random.bits(jax.random.fold_in(key, index), matrix, jnp.uint32 if format == "int4" else jnp.uint8)
        bits = bits & jnp.uint8(0xFE) if format == "fp8" else bits  # no number has all bits below the sign
        place = (index // num_experts, index % num_experts, *(0 for _ in matrix))
        codes = jax.lax.bitcast_convert_type(bits, dtype)
        return jax.lax.dynamic_update_slice(drawn, codes[None, None], place)

    return jax.lax.fori_loop(0, num_layers * num_experts, draw, jnp.zeros(shape, dtype))
