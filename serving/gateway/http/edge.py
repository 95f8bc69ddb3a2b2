"""What holds for every HTTP exchange, whatever its route: an id, a count, what browsers may, a body.

A plain ASGI wrapper: Starlette's BaseHTTPMiddleware would put a queue between a stream and its client.
"""

import asyncio
import re
import secrets
from collections.abc import Callable

from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonshard.rpc.status import Cancelled, RequestError, Unavailable
from moonshard.serving.gateway.caller import first_values
from moonshard.serving.gateway.http.cross_origin import METHODS, preflight_response, readable_headers
from moonshard.serving.gateway.http.errors import error_response, is_anthropics, late_headers
from moonshard.serving.gateway.http.strangers import Strangers
from moonshard.serving.gateway.intake.body import Body
from moonshard.serving.gateway.intake.bounds import Intake
from moonshard.serving.gateway.intake.inflate import Inflater, encoding_of
from moonshard.serving.gateway.intake.json_marks import Contents
from moonshard.serving.gateway.pipeline.generation import DRAINING_RETRY_AFTER_S
from moonshard.serving.gateway.records.metrics import GatewayMetrics

SHARE = "moonshard.share"  # in an exchange's scope: its share of the bytes in flight
ANSWER_PIECE_BYTES = 1 << 16
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Edge:
    """Gives each exchange an id (the client's own x-request-id if printable), echoes it, and counts the answer.

    Turns away whom `strangers` does not let in, and tells browsers which pages may read an answer. A path with a slash
    at its end is the path.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: frozenset[str], strangers: Strangers) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._strangers = strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = scope["path"].rstrip("/") or "/"
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _CLIENT_ID.fullmatch(given) else secrets.token_hex(16)
        scope["request_id"] = request_id

        is_started = False

        async def send_marked(message: Message) -> None:
            nonlocal is_started
            is_started = True
            if message["type"] == "http.response.start":
                self._count(scope["path"], message["status"])
                names = (b"x-request-id", b"request-id") if is_anthropics(scope["path"]) else (b"x-request-id",)
                marked = [*message["headers"], *((name, request_id.encode()) for name in names)]
                message["headers"] = [*marked, *readable_headers(self._strangers, headers, marked)]
            await send(message)

        try:
            await (self._own_answer(headers, scope["method"], scope["path"]) or self._app)(scope, receive, send_marked)
        except asyncio.CancelledError:  # the process ends, and waits no longer for what has been asked
            if not is_started:
                refused = Unavailable("the server is shutting down", retry_after_s=DRAINING_RETRY_AFTER_S)
                await error_response(refused, path=scope["path"])(scope, receive, send_marked)
            raise
        finally:
            if (share := scope.get(SHARE)) is not None:
                share.give_back()

    def _own_answer(self, headers: Headers, method: str, path: str) -> Response | None:
        """The answer to whoever may not go on, and to a browser that asks what a page may; None for all others."""
        try:
            self._strangers.check(headers.getlist)
        except RequestError as error:
            return error_response(error, path=path)
        if method != "OPTIONS":
            return None
        of_server = Response(None, 204, {"allow": METHODS}) if path == "*" else None
        return preflight_response(self._strangers, headers) or of_server

    def _count(self, path: str, status: int) -> None:
        route = path if path in self._routes else "other"  # a client must not be able to make up label values
        self._metrics.http_requests.labels(route, str(status)).inc()


def header_of(request: Request) -> Callable[[str], str | None]:
    """Gives a header's value as text: UTF-8, as in bodies, where it is that; any bytes are allowed in a header."""

    first = first_values(request.headers.getlist)

    def header(name: str) -> str | None:
        value = first(name)
        try:
            return None if value is None else value.encode("latin-1").decode()
        except UnicodeDecodeError:
            return value

    return header


def visible_id(request: Request, prefix: str) -> str:
    """The id of the response object: OpenAI's prefix before the exchange's id (as vLLM)."""
    return prefix + request.scope["request_id"]


async def read_body(request: Request, intake: Intake, *, num_contexts: int = 1) -> tuple[bytes, Contents]:
    """The body, decompressed and within bounds, and what its JSON holds.

    A body beyond the bounds, by its bytes or by its contents, is refused as soon as that is known, and not held. A body
    counts as in flight, with what is made of it, until the exchange is over. `num_contexts`: how many times the context
    its text may be.

    Raises TooLarge, ContextLengthExceeded, Overloaded; InvalidArgument and Unavailable as `Intake.checked`;
    UnsupportedEncoding and InvalidArgument as `inflate`; Cancelled where the client leaves.
    """
    encoding = encoding_of(request.headers.getlist("content-encoding"))
    inflater = None if encoding == "identity" else Inflater(encoding)
    share, admit = intake.admission(num_contexts)
    request.scope[SHARE] = share
    declared = request.headers.get("content-length", "")
    intake.bounds().check_bytes(int(declared) if declared.isdecimal() else 0, num_contexts)
    num_bytes, body = 0, Body(admit)
    try:
        async for part in request.stream():
            num_bytes += len(part)
            admit(num_bytes)
            if inflater is None:
                body.add(part)
                continue
            for piece in inflater.pieces(part):
                body.add(piece)
                await asyncio.sleep(0)  # others' turn: a part may hold a thousand pieces
    except ClientDisconnect as error:
        raise Cancelled("the client left while sending its request") from error
    if inflater is not None:
        inflater.finish()
    whole = await body.whole()
    return whole, await intake.checked(whole, share, num_contexts)


def large_answer(request: Request, body: bytes) -> Response:
    """An answer of JSON that may be long. It counts as in flight until its client has taken nearly all of it."""
    if (share := request.scope.get(SHARE)) is not None:
        share.count_in(len(body))
    return InPieces(body, headers=late_headers(request), media_type="application/json")


class InPieces(Response):
    """A body sent piece by piece, as fast as it is taken: in one piece all of it would lie in the connection's buffer,
    and nothing would wait for the client.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), ANSWER_PIECE_BYTES):
            piece = bytes(self.body[start : start + ANSWER_PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
