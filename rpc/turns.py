"""Whose request is waited for: a few at once, since each may hold as much as a request can.

Left out: requests whose bytes are counted as they come. Here nothing is known of one until it is whole.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from moonshard.rpc.status import RequestTimeout


class Turns:
    """`num` at once; the others wait in line. Runs on one event loop.

    A turn lasts `patience_s` at the most, and `hurried_s` while others wait for theirs.
    """

    def __init__(self, num: int, *, patience_s: float, hurried_s: float) -> None:
        self._places = asyncio.Semaphore(num)
        self._patience_s = patience_s
        self._hurried_s = hurried_s
        self._num_waiting = 0
        self._begun: dict[asyncio.Timeout, float] = {}  # when, by the loop's clock

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """RequestTimeout where the block takes too long."""
        await self._wait()
        wait = asyncio.timeout(self._hurried_s if self._num_waiting else self._patience_s)
        try:
            async with wait:
                self._begun[wait] = asyncio.get_running_loop().time()
                try:
                    yield
                finally:
                    del self._begun[wait]
        except TimeoutError:
            if not wait.expired():
                raise
            raise RequestTimeout("the message took too long to arrive") from None
        finally:
            self._places.release()

    async def _wait(self) -> None:
        if self._places.locked():
            self._hurry()
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1

    def _hurry(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for wait, begun_s in self._begun.items():
            when_s = wait.when()
            end_s = max(now_s, begun_s + self._hurried_s)
            if when_s is not None and end_s < when_s:
                wait.reschedule(end_s)
