"""Puts blocks into each tier and gets them back, call by call. Needs no device.

Every repeat has other names and other bytes, and every block that comes back is compared.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from moonshard.experiments.bench.tiers.record import Moved
from moonshard.kv.prefix import NAME_BYTES, BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.host import HostTier
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.retention import Lru
from moonshard.kv.store.ssd.files import FileTier
from moonshard.kv.store.ssd.folder import PAYLOAD
from moonshard.kv.store.tier import Tier
from moonshard.serving.config.faults import MIN_DRAM_BYTES
from moonshard.serving.store.ports import StorePorts
from moonshard.serving.store.processes import MooncakeProcesses, StoreSettings

MEMCPY = "memcpy"
PLAIN, UNCACHED, DIRECT = "ssd", "ssd, uncached", "ssd, O_DIRECT"
LAYOUT = bytes(16)
START_S = 10.0
POLL_S = REST_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    tier: Tier
    before_get: Callable[[], None]

    def put_and_get(self, names: Sequence[BlockName], blocks: Bytes) -> tuple[float, float]:
        """Seconds of each. ValueError where a block does not come back as it was."""
        out = np.empty_like(blocks)
        out[:] = 0  # so that its memory is there
        put_s, kept = _timed(lambda: self.tier.keep(names, blocks))
        self.before_get()
        get_s, came = _timed(lambda: self.tier.fetch(names, out))
        if not (all(kept) and all(came) and np.array_equal(out, blocks)):
            raise ValueError(f"{self.tier.name}: blocks do not come back as they were put")
        return put_s, get_s


def move(block_bytes: int, num_blocks: Sequence[int], repeats: int, folder: Path, seed: int) -> list[Moved]:
    """All ways take turns within a repeat, so that what else happens on the machine hits all of them.

    Files are left in `folder`. TimeoutError where Mooncake Store does not answer.
    """
    random = np.random.default_rng(seed)
    room_bytes = 2 * block_bytes * (repeats + 1) * sum(num_blocks)  # nothing is given up while it is measured
    with ExitStack() as stack:
        ways = {name: stack.enter_context(opened) for name, opened in _ways(block_bytes, room_bytes, folder)}
        return [
            moved
            for number in num_blocks
            for moved in _moved(ways, number, [_blocks(random, number, block_bytes) for _ in range(repeats + 1)])
        ]


def _moved(ways: Mapping[str, Way], num_blocks: int, rounds: Sequence[tuple[list[BlockName], Bytes]]) -> list[Moved]:
    """One call of each way for each round, of which the first is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (MEMCPY, *ways)}
    for names, blocks in rounds:
        times[MEMCPY].append(_copied(blocks))
        for name, way in ways.items():
            times[name].append(way.put_and_get(names, blocks))
    return [
        Moved(
            way=name,
            num_blocks=num_blocks,
            put_s=tuple(put_s for put_s, _ in found[1:]),
            get_s=tuple(get_s for _, get_s in found[1:]),
        )
        for name, found in times.items()
    ]


def _blocks(random: np.random.Generator, number: int, block_bytes: int) -> tuple[list[BlockName], Bytes]:
    names = [random.bytes(NAME_BYTES) for _ in range(number)]
    return names, random.integers(0, 256, (number, block_bytes), np.uint8)


def _ways(block_bytes: int, room_bytes: int, folder: Path) -> Iterator[tuple[str, AbstractContextManager[Way]]]:
    yield "host", _open(Way(tier=HostTier(block_bytes=block_bytes, max_bytes=room_bytes), before_get=_keep))
    for name in (PLAIN, UNCACHED, DIRECT):
        tier = FileTier.open(
            folder / name,
            block_bytes=block_bytes,
            layout=LAYOUT,
            max_bytes=room_bytes,
            policy=Lru(),
            direct=name == DIRECT,
        )
        forget = partial(_forget, folder / name) if name == UNCACHED else _keep
        yield name, _open(Way(tier=tier, before_get=forget))
    yield "store", _shared(block_bytes, room_bytes)


@contextmanager
def _open(way: Way) -> Iterator[Way]:
    try:
        yield way
    finally:
        way.tier.close()


@contextmanager
def _shared(block_bytes: int, room_bytes: int) -> Iterator[Way]:
    """Mooncake Store with processes of its own."""
    settings = StoreSettings(segment_bytes=max(room_bytes, MIN_DRAM_BYTES))
    processes = MooncakeProcesses(StorePorts.free(), settings)
    processes.start()
    try:
        config = MooncakeStoreConfig(address=processes.ports.client_address, rest_s=REST_S, timeout_s=START_S)
        tier = MooncakeStoreTier.start(layout=LAYOUT, block_bytes=block_bytes, config=config)
        with _open(Way(tier=tier, before_get=_keep)) as way:
            _wait_until_on(tier)
            yield way
    finally:
        processes.stop()


def _wait_until_on(tier: Tier) -> None:
    """Asks again and again: the store notifies nobody."""
    deadline_s = time.perf_counter() + START_S
    probe = np.zeros((1, tier.block_bytes), np.uint8)
    while not all(tier.keep([bytes(NAME_BYTES)], probe)):
        if time.perf_counter() > deadline_s:
            raise TimeoutError("Mooncake Store does not answer")
        time.sleep(POLL_S)


def _keep() -> None:
    """What the system has cached."""


def _forget(folder: Path) -> None:
    """What the system has cached of the blocks in a folder. FileNotFoundError where there are none."""
    paths = list(folder.rglob(PAYLOAD))
    if not paths:
        raise FileNotFoundError(f"{folder}: no file {PAYLOAD}")
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is dirty stays cached
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copied(blocks: Bytes) -> tuple[float, float]:
    out = np.empty_like(blocks)
    out[:] = 0  # so that its memory is there
    put_s, _ = _timed(lambda: np.copyto(out, blocks))
    get_s, _ = _timed(lambda: np.copyto(blocks, out))
    return put_s, get_s


def _timed[T](call: Callable[[], T]) -> tuple[float, T]:
    began_s = time.perf_counter()
    found = call()
    return time.perf_counter() - began_s, found
