"""Correct first: the model against recorded logits, and the GPU kernels against the dense reference.

Runs before anything is timed; a number from a wrong program is worth nothing. Fresh inputs come from the run's seed.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.pages import allocate_pages
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.model import Batch, Model
from moonshard.models.registry import open_model
from moonshard.models.spec import page_layers
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

LOGIT_TOLERANCE = 2e-4  # absolute, float32 against the recorded float32 logits
SUM_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # of the norm, against float32 sums of the same values
MODELS = ("kimi_k2", "dsv3_groups")
BLOCK_SIZE, NUM_BLOCKS = 16, 16
POISON_BYTES = 1 << 30
DECODED = 6  # tokens fed one by one after the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN never passes


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeCase:
    """Sizes of one comparison of a backend with the dense reference."""

    num_tokens: int
    top_k: int
    num_experts: int
    embed: int
    ffw: int


def check_models(fixtures: Path, models: tuple[str, ...], backends: dict[str, moe.Backend]) -> Iterator[Check]:
    """Logits and greedy tokens of the recorded prompts, in float32, prefilled and decoded through pages."""
    for fixture in models:
        checkpoint, model = open_model(fixtures / fixture)
        loaded = weights.load(model.declare(), checkpoint, "float32", build_mesh(MeshShape()))
        with np.load(fixtures / fixture / "ref.npz") as recorded:
            for name, backend in backends.items():
                error, num_wrong = _compare(model, loaded, recorded, backend)
                yield Check(name=f"{fixture} logits, {name}", error=error, tolerance=LOGIT_TOLERANCE)
                yield Check(name=f"{fixture} greedy tokens that differ, {name}", error=num_wrong, tolerance=0)


def _compare(model: Model, loaded: Any, recorded: Any, backend: moe.Backend) -> tuple[float, int]:
    """The largest error of any logit, and how many greedy tokens differ."""
    run = jax.jit(functools.partial(_logits, model, backend), donate_argnums=1)
    errors, num_wrong = [], 0
    for prompt in range(3):
        ids, greedy = recorded[f"ids{prompt}"], recorded[f"greedy{prompt}"]
        fed = np.concatenate([ids, greedy[:-1]])
        expected = np.concatenate([recorded[f"logits{prompt}"], recorded[f"greedy_logits{prompt}"][1:]])
        logits = _feed(model, loaded, run, fed)
        errors.append(np.abs(logits - expected).max())
        num_wrong += int((logits[len(ids) - 1 :].argmax(axis=-1) != greedy).sum())
    return float(np.max(errors)), num_wrong


def _logits(model: Model, backend: moe.Backend, loaded: Any, pages: jax.Array, batch: Batch) -> Any:
    with jax.default_matmul_precision("highest"):
        hidden, pages, _ = model.forward(loaded, pages, batch, backend=backend)
        return model.unembed(loaded, hidden.reshape(-1, hidden.shape[-1])), pages


def _feed(model: Model, loaded: Any, run: Any, fed: np.ndarray) -> np.ndarray:
    """All but the last few tokens as one padded chunk, the others one by one: logits [T, vocab]."""
    everywhere = replicated(build_mesh(MeshShape()))
    groups, num_layers = model.kv_groups("float32"), model.config.num_hidden_layers
    num_blocks = len(groups) * NUM_BLOCKS
    shape = (num_blocks, page_layers(groups, range(num_layers)), BLOCK_SIZE, groups[0].num_features)
    pages = allocate_pages(*shape, dtype="float32", sharding=everywhere)
    table = np.random.default_rng(0).permutation(num_blocks).reshape(len(groups), NUM_BLOCKS)
    count, size = len(fed) - DECODED, 128
    tokens, positions = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    tokens[:count], positions[:count] = fed[:count], np.arange(count)
    logits, pages = run(loaded, pages, _one_row(tokens, positions, table))
    parts = [np.asarray(logits)[:count]]
    for position in range(count, len(fed)):
        row = _one_row(fed[position : position + 1], np.asarray([position]), table)
        logits, pages = run(loaded, pages, row)
        parts.append(np.asarray(logits))
    return np.concatenate(parts)


def _one_row(tokens: np.ndarray, positions: np.ndarray, table: np.ndarray) -> Batch:
    return Batch(
        tokens=jnp.asarray(tokens[None], jnp.int32),
        positions=jnp.asarray(positions[None], jnp.int32),
        block_tables=jnp.asarray(table[None], jnp.int32),
    )


def check_sums(backend: moe.Backend, cases: tuple[MoeCase, ...], seed: int) -> Iterator[Check]:
    """A backend's sums on fresh random values against `moe.dense` in float32."""
    for number, case in enumerate(cases):
        for dtype, tolerance in SUM_TOLERANCE.items():
            error = _sum_error(backend, case, dtype, jax.random.key(seed + number))
            name = f"MoE {case.num_tokens} x {case.embed} x {case.ffw}, {case.num_experts} experts, {dtype}"
            yield Check(name=name, error=error, tolerance=tolerance)


def _sum_error(backend: moe.Backend, case: MoeCase, dtype: str, key: jax.Array) -> float:
    keys = jax.random.split(key, 4)
    e, d, f, layers = case.num_experts, case.embed, case.ffw, 2
    x = jax.random.normal(keys[0], (case.num_tokens, d), dtype)
    experts = moe.Experts(
        gate_up=jax.random.normal(keys[1], (layers, e, 2, f, d), dtype) * jnp.asarray(d**-0.5, dtype),
        down=jax.random.normal(keys[2], (layers, e, d, f), dtype) * jnp.asarray(f**-0.5, dtype),
    )
    valid = jnp.arange(case.num_tokens) % 7 != 3
    routing, layer = draw_routing(keys[3], case.num_tokens, e, case.top_k), jnp.int32(layers - 1)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda leaf: leaf[-1:].astype(jnp.float32), experts)
        expected = jax.jit(moe.dense)(x.astype(jnp.float32), routing, valid, wide, jnp.int32(0))
        run = jax.jit(backend)
        jax.block_until_ready(run(x, routing, valid, experts, layer))  # compiled: nothing else is allocated then
        poison_memory()
        got = run(x, routing, valid, experts, layer)
    return relative_error(got, expected)


def draw_routing(key: jax.Array, num_tokens: int, num_experts: int, top_k: int) -> moe.Routing:
    """Distinct experts for every token, all equally likely, with weights that sum to one."""
    scores = jax.random.uniform(key, (num_tokens, num_experts))
    best, chosen = jax.lax.top_k(scores, top_k)
    return moe.Routing(
        weights=best / best.sum(axis=1, keepdims=True), experts=chosen, margin=jnp.full(num_tokens, jnp.inf)
    )


def poison_memory() -> None:
    """What is allocated next lies where there were no numbers: what a kernel does not write is found."""
    if jax.default_backend() == "gpu":
        jax.block_until_ready([jnp.full(POISON_BYTES >> shift, jnp.nan, jnp.bfloat16) for shift in range(1, 12)])


def relative_error(got: jax.Array, expected: jax.Array) -> float:
    difference = np.asarray(got, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(expected, np.float64)))
