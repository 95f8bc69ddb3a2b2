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

from moonshard.rpc.status import Cancelled, InternalError, RequestError, TooLarge, advice, openai_error
from moonshard.serving.gateway.metrics import GatewayMetrics

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

        await self._app(scope, receive, send_marked)

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


async def read_body(request: Request, max_bytes: int) -> bytes:
    """TooLarge as soon as the limit is passed: a body is never held beyond it."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise TooLarge(f"the body has {declared} bytes, the limit is {max_bytes}")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise TooLarge(f"the body exceeds the limit of {max_bytes} bytes")
    except ClientDisconnect as error:
        raise Cancelled("the client left while sending its request") from error
    return bytes(body)


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
