"""What holds for every HTTP exchange, whatever its route: a request id, a count, a limit on the body, one error shape.

A plain ASGI wrapper: Starlette's BaseHTTPMiddleware would put a queue between a stream and its client.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec
from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonshard.rpc.status import Cancelled, InternalError, RequestError, advice, openai_error
from moonshard.serving.gateway.intake import Intake
from moonshard.serving.gateway.metrics import GatewayMetrics

_SHARE = "moonshard.share"  # in an exchange's scope: its share of the bytes in flight
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Edge:
    """Gives each exchange an id (the client's own x-request-id if printable), echoes it, and counts the answer."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _CLIENT_ID.fullmatch(given) else secrets.token_hex(16)
        scope["request_id"] = request_id

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope["path"], message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        finally:
            if (share := scope.get(_SHARE)) is not None:
                share.give_back()

    def _count(self, path: str, status: int) -> None:
        route = path if path in self._routes else "other"  # a client must not be able to make up label values
        self._metrics.http_requests.labels(route, str(status)).inc()


def header_of(request: Request) -> Callable[[str], str | None]:
    """Gives a header's value as text: UTF-8, as in bodies, where it is that; any bytes are allowed in a header."""

    def header(name: str) -> str | None:
        value = request.headers.get(name)
        try:
            return None if value is None else value.encode("latin-1").decode()
        except UnicodeDecodeError:
            return value

    return header


def visible_id(request: Request, prefix: str) -> str:
    """The id of the response object: OpenAI's prefix before the exchange's id (as vLLM)."""
    return prefix + request.scope["request_id"]


async def read_body(request: Request, intake: Intake, *, num_contexts: int = 1) -> bytes:
    """The body, in bounds: what is beyond them is refused as soon as it is known of, and never held.

    Its bytes count as in flight until the exchange is over. `num_contexts`: how many times the context its text may be.
    Raises TooLarge, ContextLengthExceeded, Overloaded; InvalidArgument for too many values; Cancelled.
    """
    share, admit = intake.admission(num_contexts)
    request.scope[_SHARE] = share
    declared = request.headers.get("content-length", "")
    admit(int(declared) if declared.isdecimal() else 0)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            admit(num_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise Cancelled("the client left while sending its request") from error
    body = b"".join(parts)
    await intake.bounds().check_values(body)
    return body


def add_error_handlers(app: FastAPI) -> None:
    """Every error, also of unknown routes and of our own making, in OpenAI's shape."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


def late_headers(request: Request) -> dict[str, str]:
    """To be filled in by whoever answers: headers that an error answer of this exchange has too."""
    return request.scope.setdefault("late_headers", {})


def error_response(error: RequestError, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    return json_response(openai_error(error), status=error.http_status, headers=advice(error) | dict(headers))


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _request_error(request: Request, error: Exception) -> Response:
    return error_response(
        error if isinstance(error, RequestError) else InternalError(str(error)), late_headers(request)
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown route or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path}: {error.detail if isinstance(error, HTTPException) else error}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return json_response({"error": body}, status=status, headers=headers)


async def _internal_error(_request: Request, _error: Exception) -> Response:
    """What went wrong is logged by the server, and is no business of the client's."""
    return error_response(InternalError("internal error"))
