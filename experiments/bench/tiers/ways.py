"""Puts blocks into each tier and gets them back, call by call. Needs no device.

Every repeat has other names and other bytes, and every block that comes back is compared.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np

from moonshard.experiments.bench.tiers.record import Moved
from moonshard.kv.prefix import NAME_BYTES, BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.host import HostTier
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.retention import Lru
from moonshard.kv.store.ssd.files import FileTier
from moonshard.kv.store.tier import Tier
from moonshard.serving.config.faults import MIN_DRAM_BYTES
from moonshard.serving.store.mooncake import MooncakeProcesses, StorePorts, StoreSettings

MEMCPY = "memcpy"
LAYOUT = bytes(16)
START_S = 10.0
PAUSE_S = 0.05


def move(block_bytes: int, num_blocks: Sequence[int], repeats: int, folder: Path, seed: int) -> list[Moved]:
    """All ways take turns within a repeat, so that what else happens on the machine hits all of them."""
    random = np.random.default_rng(seed)
    found = list[Moved]()
    capacity = block_bytes * (max(num_blocks) * (repeats + 2) * len(num_blocks))
    with ExitStack() as stack:
        tiers = {way: stack.enter_context(opened) for way, opened in _tiers(block_bytes, capacity, folder)}
        for number in num_blocks:
            puts, gets = ({way: list[float]() for way in (MEMCPY, *tiers)} for _ in range(2))
            for repeat in range(repeats + 1):  # the first is not counted
                names = [random.bytes(NAME_BYTES) for _ in range(number)]
                blocks = random.integers(0, 256, (number, block_bytes), np.uint8)
                times = {way: _put_and_get(tier, names, blocks) for way, tier in tiers.items()}
                times[MEMCPY] = _copied(blocks)
                for way, (put_s, get_s) in times.items() if repeat else ():
                    puts[way].append(put_s)
                    gets[way].append(get_s)
            found += [Moved(way=way, num_blocks=number, put_s=tuple(puts[way]), get_s=tuple(gets[way])) for way in puts]
    return found


def _tiers(block_bytes: int, capacity: int, folder: Path) -> Iterator[tuple[str, AbstractContextManager[Tier]]]:
    yield "host", _closing(HostTier(block_bytes=block_bytes, max_bytes=capacity))
    for way, direct in (("ssd", False), ("ssd, O_DIRECT", True)):
        tier = FileTier.open(
            folder / way,
            block_bytes=block_bytes,
            layout=LAYOUT,
            max_bytes=2 * capacity,
            policy=Lru(),
            direct=direct,
        )
        yield way, _closing(tier)
    yield "store", _shared(block_bytes, 2 * capacity)


@contextmanager
def _closing(tier: Tier) -> Iterator[Tier]:
    try:
        yield tier
    finally:
        tier.close()


@contextmanager
def _shared(block_bytes: int, num_bytes: int) -> Iterator[Tier]:
    """Mooncake Store with processes of its own. TimeoutError where it does not answer."""
    settings = StoreSettings(segment_bytes=max(num_bytes, MIN_DRAM_BYTES))
    processes = MooncakeProcesses(StorePorts.free(), settings)
    processes.start()
    try:
        config = MooncakeStoreConfig(address=processes.ports.client_address, rest_s=PAUSE_S, timeout_s=START_S)
        with _closing(MooncakeStoreTier.start(layout=LAYOUT, block_bytes=block_bytes, config=config)) as tier:
            _await_on(tier)
            yield tier
    finally:
        processes.stop()


def _await_on(tier: Tier) -> None:
    deadline_s = time.perf_counter() + START_S
    probe = np.zeros((1, tier.block_bytes), np.uint8)
    while not all(tier.keep([bytes(NAME_BYTES)], probe)):
        if time.perf_counter() > deadline_s:
            raise TimeoutError("Mooncake Store does not answer")
        time.sleep(PAUSE_S)


def _put_and_get(tier: Tier, names: Sequence[BlockName], blocks: Bytes) -> tuple[float, float]:
    """Seconds of each. ValueError where a block does not come back as it was."""
    out = np.empty_like(blocks)
    out[:] = 0  # so that its memory is there
    put_s, kept = _timed(lambda: tier.keep(names, blocks))
    get_s, came = _timed(lambda: tier.fetch(names, out))
    if not (all(kept) and all(came) and np.array_equal(out, blocks)):
        raise ValueError(f"{tier.name}: blocks do not come back as they were put")
    return put_s, get_s


def _copied(blocks: Bytes) -> tuple[float, float]:
    out = np.empty_like(blocks)
    out[:] = 0
    put_s, _ = _timed(lambda: np.copyto(out, blocks))
    get_s, _ = _timed(lambda: np.copyto(blocks, out))
    return put_s, get_s


def _timed[T](call: Callable[[], T]) -> tuple[float, T]:
    began_s = time.perf_counter()
    found = call()
    return time.perf_counter() - began_s, found
