"""What an HTTP/1.0 client can read: uvicorn would send it chunks, which came with HTTP/1.1.

A body whose length was not said ends with its connection; one whose length was said leaves the connection open where
the client asked for that. Source: RFC 9112, sections 6.1 and 9.3, and appendix C.2.2.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def framed_as_1_0(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The app with its answer framed for HTTP/1.0, for the one exchange of this cycle."""
    cycle.waiting_for_100_continue = False  # HTTP/1.0 has no interim answers

    async def framed(scope: Scope, receive: Receive, send: Send) -> None:
        framing = _Framing(cycle, send, is_kept=_asks_to_be_kept(scope))
        await app(scope, receive, framing.send)

    return framed


class _Framing:
    def __init__(self, cycle: RequestResponseCycle, send: Send, *, is_kept: bool) -> None:
        self._cycle = cycle
        self._send = send
        self._is_kept = is_kept
        self._is_length_known = True

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = self._started(message)
        elif not self._is_length_known:
            self._cycle.expected_content_length = len(message.get("body", b""))  # uvicorn holds each part to it
        await self._send(message)

    def _started(self, message: Message) -> Message:
        headers = list(message.get("headers", []))
        self._is_length_known = any(name.lower() == b"content-length" for name, _ in headers)
        if not self._is_length_known:
            self._cycle.chunked_encoding = False
        elif self._is_kept:
            self._cycle.keep_alive = True
            headers.append((b"connection", b"keep-alive"))
        return {**message, "headers": headers}


def _asks_to_be_kept(scope: Scope) -> bool:
    options = ",".join(Headers(scope=scope).getlist("connection")).split(",")
    return "keep-alive" in (option.strip().lower() for option in options)
