"""Work for one request that takes long, done beside the event loop on a few threads.

Python code on a thread and the loop take turns of `SWITCH_INTERVAL_S`, so streams go on, somewhat slower. The threads
are few so that large requests wait for each other, and not everybody for all of them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

MAX_INLINE_SIZE = 1 << 13  # takes the loop a few milliseconds; a thread costs it 0.1 ms
# Of the process, set by `run_gateway`. Beside a chat of 16,000 messages `/health` took 6 and 21 ms, and at Python's
# default of 5 ms 23 and 28 (medians of five, in turn); beside as many ids as fit it is the same at either.
SWITCH_INTERVAL_S = 0.0005


class Aside:
    """The threads of one event loop."""

    def __init__(self, num_threads: int = 1, name: str = "aside", *, max_inline_size: int = MAX_INLINE_SIZE) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._max_inline_size = max_inline_size

    async def run[**P, T](self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. Small work, by `size` in bytes or tokens, is done at once on the event loop.

        Cancelled while it waits for a thread, the work is never done and nothing of it is kept; cancelled later, it
        runs to its end and its result is dropped.
        """
        if size <= self._max_inline_size:
            return work(*args, **kwargs)
        task = _Task(partial(work, *args, **kwargs))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, task)
        finally:
            task.work = None


class _Task[T]:
    """Work that waits for a thread. It is emptied when it is over, since a cancelled one stays in the threads' queue
    until its turn.
    """

    __slots__ = ("work",)

    def __init__(self, work: Callable[[], T]) -> None:
        self.work: Callable[[], T] | None = work

    def __call__(self) -> T:
        work, self.work = self.work, None
        if work is None:
            raise asyncio.CancelledError
        return work()
