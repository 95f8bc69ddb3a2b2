"""Errors as answers: each route's own shape, which is OpenAI's or, under `/v1/messages`, Anthropic's.

Also those of unknown routes and faults of our own. What an error is called in either is `rpc.status`'s and
`gateway.messages.errors`' to say.
"""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from moonshard.rpc.status import InternalError, RequestError, UnsupportedEncoding, advice, openai_error
from moonshard.serving.gateway.intake.inflate import ACCEPTED
from moonshard.serving.gateway.messages.errors import PATH as MESSAGES_PATH
from moonshard.serving.gateway.messages.errors import anthropic_error, anthropic_http_error


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


def error_response(
    error: RequestError, headers: Mapping[str, str] = MappingProxyType({}), *, path: str = ""
) -> Response:
    """`path`: what was asked for, by which the shape is chosen."""
    accepted = {"accept-encoding": ACCEPTED} if isinstance(error, UnsupportedEncoding) else {}
    headers = advice(error) | accepted | dict(headers)
    body = anthropic_error(error) if is_anthropics(path) else openai_error(error)
    return json_response(body, status=error.http_status, headers=headers)


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def late_headers(request: Request) -> dict[str, str]:
    """Headers to be filled in by whoever answers; an error answer of this exchange has them too."""
    return request.scope.setdefault("late_headers", {})


async def _request_error(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, RequestError) else InternalError(str(error))
    return error_response(known, late_headers(request), path=request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """The answer to an unknown route or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path}: {error.detail if isinstance(error, HTTPException) else error}"
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if is_anthropics(request.url.path):
        return json_response(anthropic_http_error(status, message), status=status, headers=headers)
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return json_response({"error": body}, status=status, headers=headers)


async def _internal_error(request: Request, _error: Exception) -> Response:
    """The answer to a fault of our own. What went wrong is logged by the server and not told to the client."""
    return error_response(InternalError("internal error"), path=request.url.path)


def is_anthropics(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
