"""What can become of a process or of its machine, and how it is undone."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from tests.cluster.matrix.deployments.machines import Machine

SLOW_TURN_S, SLOW_SHARE = 0.05, 0.1  # a process that is ten times slower runs for a tenth of each turn
Pids = Sequence[int]


def killed(machine: Machine, pids: Pids) -> Iterator[None]:
    del machine
    _send(signal.SIGKILL, pids)
    yield


def stopped(machine: Machine, pids: Pids) -> Iterator[None]:
    """Whoever watches it ends it, or else who measures does, as an operator would."""
    del machine
    _send(signal.SIGSTOP, pids)
    try:
        yield
    finally:
        _send(signal.SIGKILL, pids)


def paused(machine: Machine, pids: Pids) -> Iterator[None]:
    """Goes on after it; whoever gave it up meanwhile may have ended it."""
    del machine
    _send(signal.SIGSTOP, pids)
    try:
        yield
    finally:
        _send(signal.SIGCONT, pids)


def slow(machine: Machine, pids: Pids) -> Iterator[None]:
    del machine
    is_over = threading.Event()
    thread = threading.Thread(target=_hold_back, args=(pids, is_over))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def cut(machine: Machine, pids: Pids) -> Iterator[None]:
    del pids
    machine.cut()
    try:
        yield
    finally:
        machine.heal()


FAULTS: Mapping[str, Callable[[Machine, Pids], Iterator[None]]] = {
    "kill -9": killed,
    "SIGSTOP": stopped,
    "SIGSTOP, 4 s later SIGCONT": paused,
    "10x slower for 8 s": slow,
    "network cut for 8 s": cut,
}
LASTS_S: Mapping[str, float] = {  # from when on it is undone; a stopped process is not, but ended after this time
    "kill -9": 0.0,
    "SIGSTOP": 8.0,
    "SIGSTOP, 4 s later SIGCONT": 4.0,
    "10x slower for 8 s": 8.0,
    "network cut for 8 s": 8.0,
}


@contextmanager
def inflicted(fault: str, machine: Machine, pids: Pids) -> Iterator[None]:
    """Inside the block it is there, and is undone after it."""
    with contextmanager(FAULTS[fault])(machine, pids):
        yield


def _send(number: int, pids: Pids) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _hold_back(pids: Pids, is_over: threading.Event) -> None:
    while not is_over.is_set():
        _send(signal.SIGSTOP, pids)
        is_over.wait((1 - SLOW_SHARE) * SLOW_TURN_S)
        _send(signal.SIGCONT, pids)
        time.sleep(SLOW_SHARE * SLOW_TURN_S)
