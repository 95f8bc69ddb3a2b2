"""Timing on a device whose calls return before they are done, and the two ceilings everything is held against.

A sample is the mean over a few calls queued back to back, so that launching the next hides behind running the last.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moonshard.experiments.bench.floors.work import Ceilings

WARM_UP_CALLS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How often something is timed."""

    num_samples: int
    calls_per_sample: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTiming:
    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        low, _, high = statistics.quantiles(self.samples_s, n=4)
        return (high - low) / 2 / self.median_s


def measure(call: Callable[[], Any], effort: Effort, *, parts: int = 1) -> KernelTiming:
    """Times `call`, which returns the arrays to wait for, or each of the equal parts that a call does one by one.

    Compilation and the first calls are not counted.
    """
    for _ in range(WARM_UP_CALLS):
        jax.block_until_ready(call())
    samples = []
    for _ in range(effort.num_samples):
        start = time.perf_counter()
        last = None
        for _ in range(effort.calls_per_sample):
            last = call()
        jax.block_until_ready(last)
        samples.append((time.perf_counter() - start) / effort.calls_per_sample / parts)
    return KernelTiming(samples_s=tuple(samples))


def measure_ceilings(copy_bytes: int, side: int, effort: Effort) -> Ceilings:
    """Times a device-to-device copy of `copy_bytes`, and a bf16 product of two random `side`-square matrices."""
    left, right = (jax.random.normal(jax.random.key(k), (side, side), jnp.bfloat16) for k in range(2))
    source = jax.random.bits(jax.random.key(2), (copy_bytes // 4,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))  # a plain copy could become an alias
    product = jax.jit(lambda a, b: a @ b)
    return Ceilings(
        bytes_per_s=2 * source.nbytes / measure(lambda: copy(source), effort).median_s,
        matmul_flops_per_s=2 * side**3 / measure(lambda: product(left, right), effort).median_s,
    )
