"""Whose processor time a sample had: the measured server's and the client's own, or somebody else's.

All busy time of all cores (`/proc/stat`), less that of the server's processes and of this one, is foreign: other
programs, the kernel's own work, servers that should be idle, and what a hypervisor took. The clocks of Linux tick
every 10 ms, so a short sample can only be accused of a few ticks or more.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from moonshard.experiments.common.machine import num_cores

MAX_FOREIGN_SHARE = 0.05  # of all cores
GRACE_S = 0.03  # of processor time: a tick or so for each of the three clocks that are read
IDLE_S = 0.1  # a moment for which nobody may have worked
MAX_BUSY_S = 0.02  # of processor time in that moment: two ticks
MAX_SETTLING_S = 2.0
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True)
class Window:
    """A sample's time on the wall, and foreign processor time in it; filled when it is over."""

    elapsed_s: float = 0.0
    foreign_s: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        return self.foreign_s > GRACE_S + MAX_FOREIGN_SHARE * num_cores() * self.elapsed_s

    @property
    def foreign_share(self) -> float:
        """Of one core."""
        return self.foreign_s / self.elapsed_s if self.elapsed_s else 0.0


@contextmanager
def watched(roots: Sequence[int]) -> Iterator[Window]:
    """Watches over the block. `roots`: the server's processes; their children are its too."""
    window = Window()
    busy_s, own_s, begun_s = _busy_s(), cpu_of_trees_s(roots) + time.process_time(), time.perf_counter()
    yield window
    window.elapsed_s = time.perf_counter() - begun_s
    own_s = cpu_of_trees_s(roots) + time.process_time() - own_s
    window.foreign_s = max(0.0, _busy_s() - busy_s - own_s)


async def settled() -> None:
    """Returns when all cores have been idle for a moment, or do not become so.

    The threads of a server that was measured last may spin on for a fifth of a second and more, as OpenMP's do.
    """
    give_up_s = time.perf_counter() + MAX_SETTLING_S
    while time.perf_counter() < give_up_s:
        busy_s = _busy_s()
        await asyncio.sleep(IDLE_S)
        if _busy_s() - busy_s <= MAX_BUSY_S:
            return


def _busy_s() -> float:
    times = psutil.cpu_times()  # a guest's time is in `user` already
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def cpu_of_trees_s(roots: Sequence[int]) -> float:
    """Processor time of these processes and all their descendants since their start."""
    total = 0.0
    for process in tree(roots):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def tree(roots: Sequence[int]) -> list[psutil.Process]:
    """These processes and all their descendants, each once; those that have ended are left out."""
    found: dict[int, psutil.Process] = {}
    for pid in roots:
        try:
            root = psutil.Process(pid)
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def listeners(url: str) -> list[int]:
    """The processes that listen on a URL's port; none where it is another machine's, or not ours to see."""
    parts = urlsplit(url)
    if parts.hostname not in LOCAL:
        return []
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        sockets = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    mine = (each for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port)
    return sorted({each.pid for each in mine if each.pid})
