"""The publishes of one transport: each on a thread of its own, so that a hung peer delays nobody else.

Stands apart because every transport whose writes block needs it, whatever it writes with. Starting a thread costs
less than 0.1 ms (measured), so that there is no pool whose threads a few hung peers could use up. Left out: how a
write is made, and how one under way is made to fail when `closing` is set.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from moonshard.kv.transfer import (
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    TransferMeter,
    TransportCounters,
)


class Publishing:
    """Threads, counters, and the end of both."""

    def __init__(self, thread_name: str):
        self.closing = threading.Event()
        self._thread_name = thread_name
        self._meter = TransferMeter()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    @property
    def counters(self) -> TransportCounters:
        return self._meter.read()

    def begin(self, copies: Copies, write: Callable[[Copies], None]) -> Future[PublishResult]:
        """Calls `write`, which blocks until all has landed or raises TransferFailed, and returns before it does.

        Any other error of `write` is the future's too.
        """
        future: Future[PublishResult] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled under the thread
        thread = threading.Thread(target=self._run, args=(copies, write, future), name=self._thread_name, daemon=True)
        with self._lock:
            if self.closing.is_set():
                future.set_exception(closed("publish", may_still_land=False))
                return future
            self._threads.add(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Sets `closing` and waits for what is under way, which must fail then. May be called again."""
        with self._lock:
            self.closing.set()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _run(self, copies: Copies, write: Callable[[Copies], None], future: Future[PublishResult]) -> None:
        start_s = time.perf_counter()
        try:
            write(copies)
        except TransferFailed as failure:
            self._meter.add_failure(failure.cause, time.perf_counter() - start_s)
            future.set_exception(failure)
        except Exception as error:  # a fault of ours, and whoever waits would never hear of it
            future.set_exception(error)
        else:
            result = PublishResult(
                num_bytes=int(copies.num_bytes.sum()),
                num_transfers=len(copies.num_bytes),
                duration_s=time.perf_counter() - start_s,
            )
            self._meter.add(result)
            future.set_result(result)
        with self._lock:
            self._threads.discard(threading.current_thread())


def closed(what: str, *, may_still_land: bool) -> TransferFailed:
    return TransferFailed(FailureCause.CLOSED, f"{what} on a closed transport", may_still_land=may_still_land)
