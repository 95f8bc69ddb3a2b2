"""What takes long of one request's work in Python, done beside the event loop.

A thread of its own, one for the process: it and the loop take turns of `SWITCH_INTERVAL_S`, so that streams go on, if
somewhat slower, and large requests wait for each other rather than all for all of them. What is short stays on the
loop: a thread costs it some 0.1 ms.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

SHORT = 1 << 13  # bytes of a message, or tokens: less takes the loop a few milliseconds
# Python's 5 ms would be had by each event of a stream anew, several times for each token.
SWITCH_INTERVAL_S = 0.0005

_thread = ThreadPoolExecutor(1, "aside")


async def aside[**P, T](size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns or raises; it takes time by `size`. Cancelled before it begins, it never does."""
    if size <= SHORT:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_thread, partial(work, *args, **kwargs))
