"""The error tree of a request, and the one table that gives each error its gRPC code and HTTP status.

Errors are raised deep inside and translated here at the edges. Start-up errors (a bad folder, mesh or configuration) are
no part of this tree: they belong to the module that finds them and end the process with exit code 2.
Codes follow google.rpc.Code's mapping to HTTP; 499 is nginx's "client closed request".
"""

from typing import ClassVar

import grpc


class RequestError(Exception):
    """A request that ends without a finish reason.

    `field` names the offending input as the client spelt it, where one can be named. `retry_after_s` is set where trying
    again later can help.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

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


class TooLarge(RequestError):
    """A body over the configured limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 413


class NotFound(RequestError):
    code = grpc.StatusCode.NOT_FOUND
    http_status = 404


class FailedPrecondition(RequestError):
    """Two parts that do not fit together: protocol version, fingerprint, dtype, block size."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500


class Overloaded(RequestError):
    """No room now; `retry_after_s` says when to try again."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class Unavailable(RequestError):
    """No worker, or a worker that went away."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineExceeded(RequestError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class Cancelled(RequestError):
    """The client left."""

    code = grpc.StatusCode.CANCELLED
    http_status = 499
