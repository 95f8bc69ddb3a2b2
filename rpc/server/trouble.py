"""Why another process of the deployment is not reached, in words for the log and for whoever asked for it.

gRPC tells a failed TLS handshake's reason only where this side failed it. Where the other side did, all that is seen is
a connection that closes at once; then this says what that can mean.
"""

import asyncio

import grpc

from moonshard.rpc.status import RequestError, from_rpc_error

_CLOSED_AT_ONCE = ("Socket closed", "Connection reset by peer")
_BEFORE_REASON = "last error: "  # gRPC names the addresses that it tried before it
_BEFORE_ERRNO = "Failed to connect to remote host: "  # and once more, which whoever tells the reason does too


def reason(error: Exception, *, has_tls: bool) -> str:
    """The reason on one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return f"it is something else: {error.details()}"
        error = from_rpc_error(error)
    if not isinstance(error, RequestError) or not error.message:
        return "it does not answer" if isinstance(error, TimeoutError) else repr(error)
    _, is_connecting, cause = error.message.rpartition(_BEFORE_REASON)
    if is_connecting and cause.endswith(_CLOSED_AT_ONCE):
        refusal = "refuses this side's certificate" if has_tls else "expects TLS"
        return f"{cause} (a server that {refusal} closes like this)"
    return cause.rpartition(_BEFORE_ERRNO)[2]


def is_expected(error: Exception) -> bool:
    """Whether the network can cause the error, so that no traceback is needed."""
    return isinstance(error, RequestError | grpc.RpcError | asyncio.InvalidStateError)
