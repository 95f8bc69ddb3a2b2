"""Health and reflection, the services that anybody may call.

Their messages are bounded in size and, where many arrive at a time, in the time that they take.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from moonshard.rpc.server.deferred_request import (
    Frames,
    ReceivedMessage,
    deferred,
    errors_as_status,
    next_message,
    only_message,
    parsed,
)
from moonshard.rpc.server.receive_limiter import ReceiveLimiter
from moonshard.rpc.status import Overloaded, RequestTimeout, TooLarge

PATHS = ("/grpc.health.v1.Health/", "/grpc.reflection.v1.", "/grpc.reflection.v1alpha.")  # how their methods begin
MAX_BYTES = 1 << 12  # of a message
MAX_PATIENT, TIMEOUT_S, HURRIED_TIMEOUT_S = 2, 30.0, 0.1  # of `ReceiveLimiter`
RETRY_AFTER_S = 60.0
MAX_WATCHES = 64  # of the health of services, which last until their clients leave


class OpenServices(grpc.aio.ServerInterceptor):
    """Other services' methods are left as they are."""

    def __init__(self) -> None:
        self._limiter = ReceiveLimiter(MAX_PATIENT, timeout_s=TIMEOUT_S, hurried_timeout_s=HURRIED_TIMEOUT_S)
        self._num_watches = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(PATHS):
            return handler
        if handler.request_streaming:
            return self._streaming(handler)
        return deferred(handler, self._read_to_watch if handler.response_streaming else self._read)

    @contextlib.asynccontextmanager
    async def _read_to_watch(self, frames: Frames, context: grpc.aio.ServicerContext) -> AsyncIterator[ReceivedMessage]:
        """Overloaded where there are too many already."""
        if self._num_watches >= MAX_WATCHES:
            raise Overloaded(f"{MAX_WATCHES} clients watch already", retry_after_s=RETRY_AFTER_S)
        self._num_watches += 1
        try:
            async with self._read(frames, context) as message:
                yield message
        finally:
            self._num_watches -= 1

    @contextlib.asynccontextmanager
    async def _read(self, frames: Frames, context: grpc.aio.ServicerContext) -> AsyncIterator[ReceivedMessage]:
        del context
        yield ReceivedMessage(_short(await only_message(frames, self._limiter)))

    def _streaming(self, handler: Any) -> grpc.RpcMethodHandler:
        async def requests(frames: Frames) -> AsyncIterator[Any]:
            """A client that asks nothing more for a while is done, as if it had said so."""
            with contextlib.suppress(RequestTimeout):
                while (data := await next_message(frames, self._limiter)) is not None:
                    yield parsed(_short(data), handler.request_deserializer)

        async def behind(frames: Frames, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with errors_as_status(context):
                async for answer in handler.stream_stream(requests(frames), context):
                    yield answer

        return grpc.stream_stream_rpc_method_handler(behind, response_serializer=handler.response_serializer)


def _short(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise TooLarge(f"the message has {len(data)} bytes, the limit is {MAX_BYTES}")
    return data
