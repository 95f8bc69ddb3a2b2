"""Mooncake Store's real processes for tests, tiers and workers on them, and what becomes of the processes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moonshard.kv.prefix import BlockName
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.tier import MissCause
from moonshard.serving.store.native import NativeProcess
from moonshard.serving.store.ports import StorePorts
from moonshard.serving.store.processes import MooncakeProcesses, StoreSettings
from tests.asked_process import AskedProcess
from tests.kv.store.mooncake.store_blocks import (
    BLOCK_BYTES,
    LAYOUT,
    await_on,
    await_that,
    blocks_of,
)

ROOT = Path(__file__).parents[4]
SETTINGS = StoreSettings(segment_bytes=64 * 1024 * 1024)
AT_ONCE_S = 1.0  # on a machine that does other things too: the library's own limit is 30 s
LONG_S = 20.0
NUM_BLOCKS = 8


def store_of(settings: StoreSettings) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(StorePorts.free(), settings)
    processes.start()
    pids = processes.pids
    yield processes
    processes.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def config_for(
    processes: MooncakeProcesses, timeout_s: float = 10.0, rest_s: float = 0.1, unhurried_timeout_s: float | None = None
) -> MooncakeStoreConfig:
    address = processes.ports.client_address
    return MooncakeStoreConfig(
        address=address,
        timeout_s=timeout_s,
        unhurried_timeout_s=timeout_s if unhurried_timeout_s is None else unhurried_timeout_s,
        max_call_bytes=5 * BLOCK_BYTES,
        rest_s=rest_s,
    )


@contextmanager
def tier_on(
    processes: MooncakeProcesses,
    *,
    layout: bytes = LAYOUT,
    timeout_s: float = 10.0,
    rest_s: float = 0.1,
    unhurried_timeout_s: float | None = None,
) -> Iterator[MooncakeStoreTier]:
    config = config_for(processes, timeout_s, rest_s, unhurried_timeout_s)
    tier = MooncakeStoreTier.start(layout=layout, block_bytes=BLOCK_BYTES, config=config)
    try:
        await_on(tier)
        yield tier
    finally:
        tier.close()


def misses(tier: MooncakeStoreTier) -> dict[MissCause, int]:
    """But for those while it was not yet on."""
    return {cause: number for cause, number in tier.counters.num_misses.items() if cause is not MissCause.OFF}


def keep(tier: MooncakeStoreTier, names: Sequence[BlockName]) -> list[bool]:
    return tier.keep(names, blocks_of(names))


def keep_until_kept(tier: MooncakeStoreTier, names: Sequence[BlockName]) -> None:
    await_that(lambda: all(keep(tier, names)))


class WorkerProcess(AskedProcess):
    def __init__(self, processes: MooncakeProcesses, timeout_s: float):
        address = processes.ports.client_address
        super().__init__(["-m", "tests.kv.store.mooncake.store_worker", address, str(timeout_s)], cwd=ROOT)
        self.ask("await_on")


@contextmanager
def worker_on(processes: MooncakeProcesses, *, timeout_s: float = 10.0) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(processes, timeout_s)
    try:
        yield worker
    finally:
        worker.kill()


def give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def stop(process: NativeProcess) -> None:
    """Returns once it has stopped."""
    assert process.pid
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def go_on(process: NativeProcess) -> None:
    assert process.pid
    os.kill(process.pid, signal.SIGCONT)


def kill(process: NativeProcess) -> None:
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    await_that(lambda: process.pid is None)


def start_again(process: NativeProcess) -> None:
    process.start()
    process.wait_until_it_answers(20.0)


def num_store_threads() -> int:
    return sum(thread.name.startswith("mooncake-store") for thread in threading.enumerate())


def process_of(processes: MooncakeProcesses, which: str) -> NativeProcess:
    return next(process for process in processes.all if process.name == f"mooncake_{which}")


def seconds_of(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s
