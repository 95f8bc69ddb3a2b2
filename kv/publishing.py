"""The publishes of one transport: each on a thread of its own, so that a hung peer delays nobody else.

Every transport whose writes block uses it. An idle thread takes the next publish; whoever starts a new one waits until
it runs (0.2 ms for a start and a join, measured). How a write is made, and how one under way fails when `closing` is
set, is the transport's part.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from moonshard.kv.transfer import (
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    TransferMeter,
    TransportCounters,
)

MAX_PUBLISHES = 64  # at once: what comes while so many hang waits for one of them to time out


class Publishing:
    """The threads that publish, their counters, and how both are closed."""

    def __init__(self, thread_name: str):
        self.closing = threading.Event()
        self._threads = ThreadPoolExecutor(MAX_PUBLISHES, thread_name_prefix=thread_name)
        self._meter = TransferMeter()
        self._lock = threading.Lock()  # none begins once it is closing

    @property
    def counters(self) -> TransportCounters:
        return self._meter.read()

    def begin(self, copies: Copies, write: Callable[[Copies], None]) -> Future[PublishResult]:
        """Calls `write`, which blocks until all has landed or raises TransferFailed, and returns before it does.

        Any other error of `write` is the future's too.
        """
        future: Future[PublishResult] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled under the thread
        with self._lock:
            if self.closing.is_set():
                future.set_exception(closed("publish", may_still_land=False))
            else:
                self._threads.submit(self._run, copies, write, future)
        return future

    def close(self) -> None:
        """Sets `closing` and waits for what is under way, which must fail then. May be called again."""
        with self._lock:
            self.closing.set()
        self._threads.shutdown(wait=True)

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


def closed(what: str, *, may_still_land: bool) -> TransferFailed:
    return TransferFailed(FailureCause.CLOSED, f"{what} on a closed transport", may_still_land=may_still_land)
