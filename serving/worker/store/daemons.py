"""A few threads for calls that may hang for good."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class DaemonThreads:
    """As a ThreadPoolExecutor, but the process does not wait for its threads at the end, and all begin with one call.

    `initializer` is run by each thread before all else.
    """

    def __init__(self, num_threads: int, name: str, *, initializer: Callable[[], None] | None = None):
        self._threads = [
            threading.Thread(target=self._run, args=(initializer,), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        self._calls: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the two below
        self._has_begun = False
        self._is_closed = False

    def submit[*Ts, T](self, work: Callable[[*Ts], T], *arguments: *Ts) -> Future[T]:
        """RuntimeError once it is closed."""
        future = Future[T]()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("these threads take nothing more")
            if not self._has_begun:
                self._has_begun = True
                for thread in self._threads:
                    thread.start()
            self._calls.put((future, lambda: work(*arguments)))  # pyright: ignore[reportArgumentType]
        return future

    def close(self) -> None:
        """Calls that were not begun are cancelled; the threads end with those that were. May be called again."""
        with self._lock:
            self._is_closed = True
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                call[0].cancel()
        for _ in self._threads:
            self._calls.put(None)

    def _run(self, initializer: Callable[[], None] | None) -> None:
        if initializer is not None:
            initializer()
        while (call := self._calls.get()) is not None:
            future, work = call
            if future.set_running_or_notify_cancel():
                _settle(future, work)
            del call, future, work  # and what they hold on to


def _settle(future: Future[object], work: Callable[[], object]) -> None:
    try:
        result = work()
    except BaseException as error:  # whoever waits is told
        future.set_exception(error)
    else:
        future.set_result(result)
