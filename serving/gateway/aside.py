"""What takes long of one request's work in Python, done beside the event loop.

In one thread: it and the loop take turns of `SWITCH_INTERVAL_S`, so that streams go on, if somewhat slower, and large
requests wait for each other rather than all for all of them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

MAX_INLINE_SIZE = 1 << 13  # takes the loop a few milliseconds; a thread costs it 0.1 ms
# At Python's default of 5 ms the loop would wait that long at each of its wake-ups, of which a token takes several. Set
# for the process by `run_gateway`.
SWITCH_INTERVAL_S = 0.0005


class Aside:
    """One event loop's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "aside")

    async def run[**P, T](self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. By `size`, bytes or tokens, small work is done here and now.

        Cancelled while it waits, it is never done; later, it runs to its end and nobody gets its result.
        """
        if size <= MAX_INLINE_SIZE:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **kwargs))
