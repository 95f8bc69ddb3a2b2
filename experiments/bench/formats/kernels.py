"""Times the kernels that read weights, each by itself, on the weights of a loaded model.

A call after another, a layer after another in one program, so that no cache holds what the next call reads as long as
the layers together are larger than it. What is told is the time of a layer's call, threads woken and joined included.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.experiments.bench.formats.record import KernelTimes
from moonshard.models.experts import moe
from moonshard.models.native.experts import grouped_experts
from moonshard.models.product import Stacked, product
from moonshard.sharding.arrays import Array

CALLS = 3  # of a program in a sample, each of all layers
EXPERTS, QUERIES = "experts", "q_b"


@dataclass(frozen=True, slots=True)
class _Program:
    call: Callable[[], Any]
    num_bytes: float  # of weights that a call reads
    num_layers: int  # each of which is a call of the kernel


class KernelSteps:
    """The kernels of one model at some batch sizes, and what their calls took so far."""

    def __init__(self, weights: Any, top_k: int, batches: Sequence[int], seed: int):
        self._programs: dict[tuple[str, int], _Program] = {}
        self._samples: dict[tuple[str, int], list[float]] = {}
        random = np.random.default_rng(seed)
        for batch in batches:
            self._programs[EXPERTS, batch] = _experts(weights.experts, top_k, batch, random)
            self._programs[QUERIES, batch] = _queries(weights.sparse.attention.q_b, batch, random)

    def run(self) -> None:
        """Each once more."""
        for key, program in self._programs.items():
            begun_s = time.perf_counter()
            jax.block_until_ready([program.call() for _ in range(CALLS)])
            seconds = (time.perf_counter() - begun_s) / CALLS / program.num_layers
            self._samples.setdefault(key, []).append(seconds)

    def times(self) -> tuple[KernelTimes, ...]:
        """Medians, but for the first sample, which compiled."""
        return tuple(
            KernelTimes(
                kernel=kernel,
                batch=batch,
                call_us=median(self._samples[kernel, batch][1:]) * 1e6,
                call_bytes=program.num_bytes / program.num_layers,
            )
            for (kernel, batch), program in self._programs.items()
        )


def _experts(experts: moe.Experts[Any], top_k: int, batch: int, random: np.random.Generator) -> _Program:
    """Every token's experts are drawn evenly."""
    num_layers, num_experts, _, _, width = experts.gate_up.shape
    chosen = np.stack(
        [np.stack([random.permutation(num_experts)[:top_k] for _ in range(batch)]) for _ in range(num_layers)]
    ).astype(np.int32)
    num_hit = sum(len(np.unique(layer)) for layer in chosen)
    x = jnp.asarray(random.standard_normal((batch, width), np.float32))
    shares, valid = jnp.full((batch, top_k), 1 / top_k, jnp.float32), jnp.ones(batch, bool)

    @jax.jit
    def program(x: Array, chosen: Array, experts: moe.Experts[Array]) -> Array:
        def layer(x: Array, place: tuple[Array, Array]) -> tuple[Array, None]:
            index, own = place
            routing = moe.Routing(weights=shares, experts=own, margin=jnp.zeros(batch))
            return x + 1e-3 * grouped_experts(x, routing, valid, experts, index), None  # each waits for the one before

        return jax.lax.scan(layer, x, (jnp.arange(num_layers), chosen))[0]

    hit_bytes = num_bytes(experts) * num_hit / (num_layers * num_experts)
    return _Program(lambda: program(x, chosen, experts), hit_bytes, num_layers)


def _queries(stack: Any, batch: int, random: np.random.Generator) -> _Program:
    """`q_b` [l h k r] of every layer, by as many rows as a step has sequences."""
    num_layers, width = stack.shape[0], stack.shape[-1]
    x = jnp.asarray(random.standard_normal((batch, width), np.float32))

    @jax.jit
    def program(x: Array, stack: Any) -> Array:
        def layer(x: Array, index: Array) -> tuple[Array, None]:
            found = product("tr,hkr->thk", x, Stacked(stack, index, batch))
            return x + 1e-3 * found.mean(), None

        return jax.lax.scan(layer, x, jnp.arange(num_layers))[0]

    return _Program(lambda: program(x, stack), num_bytes(stack), num_layers)


def num_bytes(held: Any) -> int:
    """Of all arrays of a tree, scales among them."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(held))
