"""How long it takes to work out which bytes go where between two meshes of eight owners, for blocks like Kimi K2's.

Adding the owners' addresses to the plan, and moving the bytes, are not timed.
"""

import functools
import time
from collections.abc import Callable

import numpy as np

from moonshard.experiments.bench.meshes.tables import (
    BLOCK_SIZE,
    DTYPE,
    LAYOUT_PAIRS,
    LAYOUTS,
    NUM_BLOCKS,
    NUM_FEATURES,
    NUM_LAYERS,
    NUM_OWNERS,
    ORDERS,
    expand_name,
    pair_name,
    plan_name,
    transfers_name,
)
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.models.spec import KvGroup
from moonshard.serving.engine.capacity.slab_layout import slab_layout
from moonshard.sharding.layout import Layout
from moonshard.sharding.reshard import expand, plan
from moonshard.sharding.shard import Shard
from moonshard.sharding.stages import split_layers

K2 = KvGroup(name="latent", layers=tuple(range(NUM_LAYERS)), num_features=NUM_FEATURES, dtype=DTYPE)
NUM_SLOTS = 64 * NUM_BLOCKS  # of a slab, from which scattered blocks are drawn


def measure_reshard(settings: Plan) -> list[Measurement]:
    """Times each figure. One more sample warms up and is not counted."""
    layouts = {name: layout_of(name) for name in LAYOUTS}
    found: list[Measurement] = []
    for source, destination in LAYOUT_PAIRS:
        pair = pair_name(source, destination)
        sides = layouts[source], layouts[destination]
        make = functools.partial(plan.__wrapped__, *sides)  # past the cache, which would have it from the first repeat
        times_ms = _times_ms(make, settings.reshard_repeats)
        found.append(Measurement(level="meshes", name=plan_name(pair), unit="ms", samples=times_ms))
        for order in ORDERS:
            found += _measure_expand(order, pair, sides, settings.reshard_repeats)
    return found


def layout_of(name: str) -> Layout:
    """The layout of a worker's slab on that mesh: eight owners, no byte twice."""
    mesh, rules = LAYOUTS[name]
    layout = slab_layout((K2,), BLOCK_SIZE, Shard(mesh=mesh, rules=rules), split_layers([1.0] * NUM_LAYERS, mesh.pipe))
    assert len(layout.groups[0].shards) == NUM_OWNERS  # as the table says
    return layout


def blocks_of(order: str) -> tuple[np.ndarray, np.ndarray]:
    """Block ids at the source and at the destination, pairwise."""
    if order == "consecutive":
        return np.arange(NUM_BLOCKS), np.arange(NUM_BLOCKS)
    random = np.random.default_rng(0)
    source, destination = (random.permutation(NUM_SLOTS)[:NUM_BLOCKS] for _ in range(2))
    return source, destination


def _measure_expand(order: str, pair: str, sides: tuple[Layout, Layout], repeats: int) -> list[Measurement]:
    template, blocks = plan(*sides), blocks_of(order)
    times_ms = _times_ms(lambda: expand(template, *blocks), repeats)
    num_transfers = float(len(expand(template, *blocks)))
    return [
        Measurement(level="meshes", name=expand_name(order, pair), unit="ms", samples=times_ms),
        Measurement(level="meshes", name=transfers_name(order, pair), unit="count", samples=(num_transfers,)),
    ]


def _times_ms(work: Callable[[], object], repeats: int) -> tuple[float, ...]:
    samples = []
    for _ in range(repeats + 1):
        begun_ns = time.perf_counter_ns()
        work()
        samples.append((time.perf_counter_ns() - begun_ns) / 1e6)
    return tuple(samples[1:])
