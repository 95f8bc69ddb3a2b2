"""What writing one step's tokens into the KV pool costs: a donated scatter, as the decode program does it.

Measured without the model, for two pool sizes, to show that the pool is written in place: a copy would grow with it.
"""

import functools
import time

import jax
import jax.numpy as jnp

from moonshard.experiments.common.running.measurement import Measurement
from moonshard.kv.pages import Pages, allocate_pages, write_tokens
from moonshard.models.spec import KvGroup

STEPS_PER_SAMPLE = 32


@functools.partial(jax.jit, donate_argnums=0)
def _write_step(pages: Pages, block_tables: jax.Array, positions: jax.Array, features: jax.Array) -> Pages:
    """Writes one token of every slot into every layer. `features` is [slots, 1, features]."""

    def write_layer(layer: jax.Array, pages: Pages) -> Pages:
        return write_tokens(pages, layer, block_tables, positions, features)

    return jax.lax.fori_loop(0, pages.shape[1], write_layer, pages)


def measure_writes(
    group: KvGroup,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    sharding: jax.sharding.NamedSharding,
    repeats: int,
) -> list[Measurement]:
    """Microseconds per step of `num_slots` tokens in all layers, for the whole pool and for a sixteenth of it."""
    found = []
    for size in (num_blocks, max(num_slots, num_blocks // 16)):
        pages = allocate_pages(
            size, group.num_layers, block_size, group.num_features, dtype=group.dtype, sharding=sharding
        )
        pool_mib = pages.nbytes / 2**20
        samples = _samples_us(pages, num_slots, repeats)
        name = f"KV write of a step, {num_slots} tokens x {group.num_layers} layers, pool of {pool_mib:.0f} MiB"
        found.append(Measurement(level="device", name=name, unit="us", samples=samples))
    return found


def _samples_us(pages: Pages, num_slots: int, repeats: int) -> tuple[float, ...]:
    """One sample is the mean over a run of steps; the first run compiles and is not counted."""
    num_blocks, _, block_size, num_features = pages.shape
    stride = num_blocks // num_slots
    block_tables = (jnp.arange(num_slots, dtype=jnp.int32) * stride)[:, None]
    features = jnp.ones((num_slots, 1, num_features), pages.dtype)
    positions = [jnp.full((num_slots, 1), step % block_size, jnp.int32) for step in range(STEPS_PER_SAMPLE)]
    samples = []
    for _ in range(repeats + 1):
        begun_ns = time.perf_counter_ns()
        for position in positions:
            pages = _write_step(pages, block_tables, position, features)
        jax.block_until_ready(pages)
        samples.append((time.perf_counter_ns() - begun_ns) / 1e3 / STEPS_PER_SAMPLE)
    return tuple(samples[1:])
