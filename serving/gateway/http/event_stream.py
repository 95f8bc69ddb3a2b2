"""A response of server-sent events whose status line waits for the first event.

Until then a refusal can still be an honest 4xx or 503; but no longer than one keep-alive period, since proxies close a
connection that stays silent. Afterwards an error is an event of its own and ends the stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moonshard.rpc.status import Cancelled, RequestError
from moonshard.serving.gateway.http.disconnect import until_disconnect

KEEP_ALIVE_S = 10.0
KEEP_ALIVE = b": keep-alive\n\n"


class EventStream(Response):
    """`events` gives encoded events. It is closed, and so its work cancelled, when the client leaves.

    `late_headers` are read when the first event is there, or the first keep-alive.
    Slow readers are waited for: `send` blocks while the connection's buffer is full, and with it `events`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        error_event: Callable[[RequestError], bytes],
        late_headers: Mapping[str, str],
        keep_alive_s: float = KEEP_ALIVE_S,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._error_event = error_event
        self._late_headers = late_headers
        self._keep_alive_s = keep_alive_s
        self._keep_alive_event = keep_alive
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except Cancelled:
            if not self._is_started:
                raise

    async def _send_all(self, send: Send) -> None:
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    keeping_alive.cancel()
                    await self._send(send, event)
        except RequestError as error:
            if not self._is_started:
                raise
            await self._send(send, self._error_event(error))
        finally:
            keeping_alive.cancel()
            await asyncio.gather(keeping_alive, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            await self._send(send, self._keep_alive_event)

    async def _send(self, send: Send, body: bytes) -> None:
        if not self._is_started:
            late = [(name.encode(), value.encode()) for name, value in self._late_headers.items()]
            headers = [*self.raw_headers, *late]
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            self._is_started = True
        await send({"type": "http.response.body", "body": body, "more_body": True})
