"""The threads on which tiers are asked and written. A tier may hang: four threads may hang with it, and no more.

Two fetch, one looks up what there is, so that nobody waits for others' blocks to hear that there are none, one writes.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from moonshard.serving.worker.store.daemons import DaemonThreads

MAX_HANGING = 2  # fetches under way at once
MAX_PENDING = 64  # calls that wait for a thread, or have one
HANGING_S = 2.0  # without any call coming back
MAX_BEHIND = 4  # calls of which nobody hears: each may hold the blocks that it is to write
LOW_PRIORITY = 19


@dataclass(frozen=True, slots=True)
class Asked[T]:
    """A call that waits for its turn, or has it. `give_up`: it is not begun any more; False where it was, or may have
    been: then it comes back some day.
    """

    future: "asyncio.Future[T]"
    give_up: Callable[[], bool]

    async def within(self, timeout_s: float) -> bool:
        """Whether it has come back by then."""
        await asyncio.wait([self.future], timeout=timeout_s)
        return self.future.done()


class Pending:
    """How many calls wait or are under way, and whether they seem to hang."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_asked = 0
        self._num_looking = 0
        self._came_s = clock()  # when the last call came back, or the first one went

    @property
    def is_full(self) -> bool:
        """Whether too much waits already, or all that are under way seem to hang."""
        hangs = self._num_asked >= MAX_HANGING and self._clock() - self._came_s > HANGING_S
        return hangs or max(self._num_asked, self._num_looking) >= MAX_PENDING

    def ask[T](self, asked: Asked[T]) -> Asked[T]:
        if not self._num_asked:
            self._came_s = self._clock()
        self._num_asked += 1
        asked.future.add_done_callback(self._came)
        return asked

    def look_up[T](self, asked: Asked[T]) -> Asked[T]:
        self._num_looking += 1
        asked.future.add_done_callback(self._looked)
        return asked

    def _looked[T](self, future: "asyncio.Future[T]") -> None:
        self._num_looking -= 1

    def _came[T](self, future: "asyncio.Future[T]") -> None:
        self._num_asked -= 1
        self._came_s = self._clock()
        if not future.cancelled():
            future.exception()  # it is told to whoever waits; where nobody does any more, to nobody


class TierThreads:
    """`ask` runs what a request waits for, `look_up` what takes no time unless it hangs, `write` what nobody waits for,
    one after another and behind all else.

    On the event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._asking = DaemonThreads(MAX_HANGING, "tier-ask")
        self._looking = DaemonThreads(1, "tier-look-up")
        self._writing = DaemonThreads(1, "tier-write", initializer=_give_way)
        self._pending = Pending(clock)
        self._num_behind = 0
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be asked: too much waits already, all threads seem to hang, or it is closed."""
        return self._is_closed or self._pending.is_full

    def ask[*Ts, T](self, work: Callable[[*Ts], T], *arguments: *Ts) -> "Asked[T]":
        """Not to be called where it `is_full`."""
        return self._pending.ask(_asked(self._asking.submit(work, *arguments)))

    def look_up[*Ts, T](self, work: Callable[[*Ts], T], *arguments: *Ts) -> "Asked[T]":
        """Not to be called where it `is_full`. Nobody need wait for it: who is late to hear may still use it."""
        return self._pending.look_up(_asked(self._looking.submit(work, *arguments)))

    async def write[*Ts, T](self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await asyncio.wrap_future(self._writing.submit(work, *arguments))

    def write_behind(self, work: Callable[[], None]) -> None:
        """As `write`, and nobody hears of its end, nor of its absence where too much waits already."""
        if self._is_closed or self._num_behind >= MAX_BEHIND:
            return
        self._num_behind += 1
        asyncio.wrap_future(self._writing.submit(work)).add_done_callback(self._was_written)

    def close(self) -> None:
        """Does not wait for what hangs, and neither does the process at its end."""
        self._is_closed = True
        for threads in (self._asking, self._looking, self._writing):
            threads.close()

    def _was_written(self, future: "asyncio.Future[None]") -> None:
        self._num_behind -= 1
        if not future.cancelled():
            future.result()  # tiers raise nothing: what comes here is a fault of ours, and is logged


def _asked[T](running: Future[T]) -> Asked[T]:
    return Asked(asyncio.wrap_future(running), running.cancel)


def _give_way() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
