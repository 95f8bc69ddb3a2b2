"""Work for a client that may leave at any moment.

Starlette notices a lost client only when it writes. A long prefill writes nothing: here someone always listens.
"""

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive

from moonshard.rpc.status import Cancelled


async def until_disconnect[T](receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled at once when the client leaves: Cancelled. Body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client left")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
