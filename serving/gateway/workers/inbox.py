"""What arrives for one request, until it is taken; all that waits is taken at once.

So a reader that is behind (its client is slow, or this process has too much to do) catches up with one message to its
client instead of one for each token, as vLLM's output collectors do. An inbox belongs to one event loop and has one
reader.
"""

import asyncio
from collections import deque
from typing import NamedTuple

from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError


class Arrival(NamedTuple):
    """One request's share of a step, stamped when the step reached this process."""

    arrived_ns: int
    output: link_pb2.SequenceOutput


class Inbox:
    """Arrivals in their order, and the error that ends them."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Arrival | RequestError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, item: Arrival | RequestError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def empty(self) -> bool:
        return not self._items

    async def take(self) -> list[Arrival]:
        """At least one. Raises the error that came, once all that came before it was taken."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take_nowait()

    def take_nowait(self) -> list[Arrival]:
        """As `take`, but returns nothing where nothing waits."""
        taken: list[Arrival] = []
        while self._items:
            if isinstance(item := self._items[0], RequestError):
                if taken:
                    break
                self._items.popleft()
                raise item
            taken.append(item)
            self._items.popleft()
        return taken
