"""The error tree of a request, and its one table: what each error is called in gRPC, HTTP and OpenAI's error body.

The table is the class attributes below. Errors are raised deep inside and translated here at the edges, in both
directions, so that a client catches the class that the server raised. Start-up errors (a bad folder, mesh or
configuration) are no part of this tree: they belong to the module that finds them and end the process with exit code 2.
Codes follow google.rpc.Code's mapping to HTTP; 499 is nginx's "client closed request". Details follow
google/rpc/error_details.proto; types and codes of the body follow OpenAI's API reference, "Error codes".
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "moonshard.v1"
# Peers refuse a header block over 8 KiB. A byte of the message costs up to 3 bytes in grpc-message (percent-encoded)
# and 4/3 in the details.
MAX_MESSAGE_BYTES = 1024
MAX_FIELD_BYTES = 256


class RequestError(Exception):
    """A request that ends without a finish reason.

    `field` names the offending input as the client spelt it, where one can be named. `retry_after_s` is set where
    trying again later can help.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    openai_code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InternalError(RequestError):
    """Our own fault."""


class InvalidArgument(RequestError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    openai_type = "invalid_request_error"
    openai_code = "invalid_value"


class ContextLengthExceeded(InvalidArgument):
    """Prompt and completion do not fit in the model's context; clients cut their prompt where they see this code."""

    openai_code = "context_length_exceeded"

    @classmethod
    def of(cls, context_tokens: int, excess: str, *, field: str | None = None) -> "ContextLengthExceeded":
        """The error in the words that clients look for that do not look at codes: LiteLLM for its first ones, LangChain
        for its last.

        `excess`: what is too long, and how long it is.
        """
        context = f"This model's maximum context length is {context_tokens} tokens"
        return cls(f"{context}. However, {excess} exceeds the context window", field=field)


class Unauthenticated(RequestError):
    """No API key, or one that names nobody."""

    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"


class TooLarge(RequestError):
    """A body over the configured limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 413
    openai_type = "invalid_request_error"
    openai_code = "request_too_large"


class UnsupportedEncoding(RequestError):
    """A body compressed in a way that is not read here."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 415
    openai_type = "invalid_request_error"
    openai_code = "unsupported_content_encoding"


class PermissionDenied(RequestError):
    """The caller, or the web page it called from, is known and may not."""

    code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    openai_type = "invalid_request_error"
    openai_code = "permission_denied"


class NotFound(RequestError):
    code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    openai_type = "invalid_request_error"
    openai_code = "not_found"


class FailedPrecondition(RequestError):
    """Two parts that do not fit together: protocol version, fingerprint, dtype, block size."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500
    openai_code = "failed_precondition"


class Overloaded(RequestError):
    """No room now; `retry_after_s` says when to try again.

    `predicted_ttft_s` is what the first token would have taken, where that can be said; errors off the wire have none.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    openai_type = "rate_limit_exceeded"
    openai_code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        predicted_ttft_s: float | None = None,
    ):
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.predicted_ttft_s = predicted_ttft_s


class Unavailable(RequestError):
    """No worker, or a worker that went away."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    openai_type = "service_unavailable"
    openai_code = "service_unavailable"


class DeadlineExceeded(RequestError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    openai_type = "timeout"
    openai_code = "deadline_exceeded"


class RequestTimeout(DeadlineExceeded):
    """The request itself did not arrive in time."""

    http_status = 408
    openai_type = "invalid_request_error"
    openai_code = "request_timeout"


class Cancelled(RequestError):
    """The client left."""

    code = grpc.StatusCode.CANCELLED
    http_status = 499
    openai_type = "invalid_request_error"
    openai_code = "request_cancelled"


ERRORS: tuple[type[RequestError], ...] = (
    InternalError,
    InvalidArgument,
    ContextLengthExceeded,
    Unauthenticated,
    TooLarge,
    UnsupportedEncoding,
    PermissionDenied,
    NotFound,
    FailedPrecondition,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    RequestTimeout,
    Cancelled,
)
_BY_NAME = {error.__name__: error for error in ERRORS}
# Codes that we never send, as a peer or the gRPC library means them; then our own, where the first class with a code
# stands for it.
_BY_CODE: Mapping[int, type[RequestError]] = {
    grpc.StatusCode.OUT_OF_RANGE.value[0]: InvalidArgument,
    grpc.StatusCode.ALREADY_EXISTS.value[0]: FailedPrecondition,
    grpc.StatusCode.UNIMPLEMENTED.value[0]: FailedPrecondition,
} | {error.code.value[0]: error for error in reversed(ERRORS)}


class RichStatus(grpc.Status):
    """A status as `ServicerContext.abort_with_status` takes it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str | bytes], ...]):
        self.code = code
        self.details = details
        self.trailing_metadata = trailing_metadata


def to_status(error: RequestError) -> RichStatus:
    """The error on the wire: code, message, and google.rpc details.

    ErrorInfo names the class, BadRequest the field, RetryInfo the delay (also in whole seconds as `retry-after`).
    Message and field are cut to what fits in a header.
    """
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    rich = status_pb2.Status(code=error.code.value[0], message=message)
    for detail in _details(error):
        rich.details.add().Pack(detail)
    return RichStatus(error.code, message, ((DETAILS_KEY, rich.SerializeToString()), *advice(error).items()))


def advice(error: RequestError) -> dict[str, str]:
    """Headers that say when to come back, and how long it would have taken; over gRPC they are trailing metadata."""
    found = {} if error.retry_after_s is None else {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, Overloaded) and error.predicted_ttft_s is not None:
        found["x-moonshard-predicted-ttft-ms"] = str(round(1e3 * error.predicted_ttft_s))
    return found


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> NoReturn:
    """Ends the call with the error. Raises, as gRPC's own abort does."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


def from_rpc_error(error: grpc.RpcError) -> RequestError:
    """The inverse of `to_status`, for the errors of sync and async calls.

    A status that is not ours gets the class that fits its code, and InternalError naming the code where none does.
    """
    code = error.code() or grpc.StatusCode.UNKNOWN
    message = error.details() or ""
    rich = _rich_status(error.trailing_metadata() or ())
    if rich is not None:
        return _from_details(code, message, rich)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in message:
        return TooLarge(message)  # gRPC's own limit on a message: trying again cannot help
    return error_from_code(code.value[0], message)


def error_from_code(number: int, message: str, field: str = "", retry_after_s: float = 0.0) -> RequestError:
    """The error of a status code's number. An empty field and a zero delay mean none, as in a proto3 message."""
    kind = _BY_CODE.get(number)
    if kind is None:
        return InternalError(f"{_code_name(number)}: {message}")
    return kind(message, field=field or None, retry_after_s=retry_after_s or None)


def openai_error(error: RequestError) -> dict[str, dict[str, str | None]]:
    """The body of an OpenAI error response; the status line is `error.http_status`.

    A message about the context has the code in it, too: OpenAI's package makes its exception's text of the message
    alone, and LangChain looks for the code in that text.
    """
    code = "model_not_found" if isinstance(error, NotFound) and error.field == "model" else error.openai_code
    field = None if error.field is None else _cut(error.field, MAX_FIELD_BYTES)  # a client's own words may be long
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    if isinstance(error, ContextLengthExceeded):
        message += f" ({code})"
    body = {"message": message, "type": error.openai_type, "param": field, "code": code}
    return {"error": body}


def _details(error: RequestError) -> Iterable[Message]:
    yield error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_cut(error.field, MAX_FIELD_BYTES))
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def _rich_status(metadata: Iterable[Any]) -> status_pb2.Status | None:
    for key, value in metadata:  # both clients give pairs, of two unrelated types
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None  # a proxy's, or cut on the way: the code and message still stand
    return None


def _from_details(code: grpc.StatusCode, message: str, rich: status_pb2.Status) -> RequestError:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in rich.details:
        # Unpack fills the one message whose type the detail has.
        _ = detail.Unpack(info) or detail.Unpack(bad) or detail.Unpack(retry)
    field = bad.field_violations[0].field if bad.field_violations else None
    retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None
    kind = _BY_NAME.get(info.reason) if info.domain == DOMAIN else None
    if kind is None:
        return error_from_code(code.value[0], message, field or "", retry_after_s or 0.0)
    return kind(message, field=field, retry_after_s=retry_after_s)


def _code_name(number: int) -> str:
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), f"status code {number}")


def _cut(text: str, max_bytes: int) -> str:
    """The longest start of `text` that fits, with an ellipsis where something was left out."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - len("…".encode())].decode(errors="ignore") + "…"
