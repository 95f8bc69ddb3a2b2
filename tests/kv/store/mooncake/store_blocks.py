"""Blocks that every process of a test can make by itself: their bytes follow from their names."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.mooncake.tier import MooncakeStoreTier

BLOCK_BYTES = 100_003  # no multiple of anything
LAYOUT = bytes(range(8))


def names_of(chain: str, num_blocks: int) -> list[BlockName]:
    return [hashlib.sha256(f"{chain} {index}".encode()).digest()[:16] for index in range(num_blocks)]


def blocks_of(names: Sequence[BlockName]) -> Bytes:
    rows = [np.random.default_rng(list(name)).integers(0, 256, BLOCK_BYTES, np.uint8) for name in names]
    return np.stack(rows)


def fetched(tier: MooncakeStoreTier, names: Sequence[BlockName]) -> tuple[list[bool], Bytes]:
    out = np.zeros((len(names), tier.block_bytes), np.uint8)
    return tier.fetch(names, out), out


def are_right(tier: MooncakeStoreTier, names: Sequence[BlockName]) -> list[bool]:
    """Which blocks come; those that do must be right."""
    came, out = fetched(tier, names)
    expected = blocks_of(names)
    for index, has_come in enumerate(came):
        assert not has_come or np.array_equal(out[index], expected[index])
    return came


def await_that(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline_s, never = time.perf_counter() + timeout_s, threading.Event()
    while not condition():
        assert time.perf_counter() < deadline_s, "it does not come about"
        never.wait(0.01)


def await_on(tier: MooncakeStoreTier) -> None:
    """Asks until the store answers."""

    def is_on() -> bool:
        tier.find(names_of("is it on", 1))
        return tier.is_on

    await_that(is_on)
