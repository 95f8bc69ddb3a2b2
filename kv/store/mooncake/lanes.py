"""A few threads for calls that may hang: whoever waits gives up in time, and a call that hangs keeps its thread.

So as many calls hang as there are lanes, and no more. Whatever belongs to a lane, such as memory that its calls write
into, is nobody else's until they have returned. Nothing can interrupt a call: the threads are daemons, so that at
least Python does not wait for it at its end.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any


class Lane:
    """One thread. Whoever holds the lane makes calls on it, one after another."""

    def __init__(self, index: int, name: str):
        self.index = index
        self._name = f"{name}-{index}"
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.last_call: Future[Any] | None = None

    def call[T](self, function: Callable[[], T], *, timeout_s: float) -> T:
        """What `function` returns or raises. TimeoutError when it takes longer: no other call may be made then."""
        return self.start(function).result(max(0.0, timeout_s))

    def begin(self) -> None:
        """Its thread starts, with the first call at the latest."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def start[T](self, function: Callable[[], T]) -> Future[T]:
        """The last call of whoever holds the lane may be one that it does not wait for."""
        self.begin()
        future = Future[T]()
        self.last_call = future
        self._inbox.put(lambda: _settle(future, function))
        return future

    def end(self) -> None:
        """The thread ends when its calls have."""
        self._inbox.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))

    def _run(self) -> None:
        while (call := self._inbox.get()) is not None:
            call()
            del call  # and what it holds on to


class Lanes:
    def __init__(self, num_lanes: int, name: str):
        self._lanes = tuple(Lane(index, name) for index in range(num_lanes))
        self._free: queue.LifoQueue[Lane] = queue.LifoQueue()
        self._is_closed = threading.Event()
        self._lock = threading.Lock()  # of the one below
        self._num_unattended = 0
        for lane in reversed(self._lanes):
            self._free.put(lane)

    def begin(self) -> None:
        """All threads start, with the priority of this one. Later each would have that of its first caller, for good:
        that of a thread that gives way to all others, for calls that requests wait for.
        """
        for lane in self._lanes:
            lane.begin()

    @property
    def are_stuck(self) -> bool:
        """Whether all are at calls that nobody waits for any more."""
        with self._lock:
            return self._num_unattended == len(self._lanes)

    @contextlib.contextmanager
    def lane(self, *, timeout_s: float) -> Iterator[Lane | None]:
        """A lane for this block alone; afterwards it is free as soon as its call has returned. None: none was free."""
        lane = self._take(timeout_s)
        try:
            yield lane
        finally:
            if lane is not None:
                self._release(lane)

    def close(self, *, timeout_s: float) -> bool:
        """Ends the threads; those that hang later than that end when their calls return. Whether none does."""
        deadline_s = time.perf_counter() + timeout_s
        self._is_closed.set()
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.join(deadline_s - time.perf_counter())
        return not any(lane.is_alive for lane in self._lanes)

    def _take(self, timeout_s: float) -> Lane | None:
        """No waiting where all hang: that takes seconds."""
        if self._is_closed.is_set():
            return None
        try:
            return self._free.get(timeout=0.0 if self.are_stuck else max(0.0, timeout_s))
        except queue.Empty:
            return None

    def _release(self, lane: Lane) -> None:
        call = lane.last_call
        if call is None or call.done():
            self._free.put(lane)
            return
        with self._lock:
            self._num_unattended += 1
        call.add_done_callback(lambda _: self._come_back(lane))

    def _come_back(self, lane: Lane) -> None:
        with self._lock:
            self._num_unattended -= 1
        self._free.put(lane)


def _settle[T](future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except Exception as error:  # whoever waits is told
        future.set_exception(error)
    else:
        future.set_result(result)
