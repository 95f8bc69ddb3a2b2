"""Methods that ask for a call's message themselves, as bytes, once its head has been looked at.

gRPC would take and parse a message before it asks the method whose it is. A method that stands there as if it took a
stream of bytes, which is the same on the wire, asks for its only message when it likes; until then no more of it is
here than HTTP/2's window. Whom to ask, and for how much, is the callers' of this.
Source: gRPC over HTTP/2, "Requests".
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from moonshard.rpc.status import InvalidArgument, RequestError, TooLarge, abort
from moonshard.rpc.turns import Turns

OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1.", "/grpc.reflection.v1alpha.")  # anybody's
OPEN_BYTES = 1 << 12  # of a message to them
OPEN_TURNS, OPEN_PATIENCE_S, OPEN_HURRIED_S = 8, 30.0, 1.0

type Frames = AsyncIterator[bytes]
type Ask = Callable[[Frames, grpc.aio.ServicerContext], AbstractAsyncContextManager[bytes]]


def asking(handler: Any, ask: Ask) -> grpc.RpcMethodHandler:
    """A method of one message, which is what `ask` gives, and is served within its block. Its errors end the call."""
    serve = handler.unary_stream or handler.unary_unary

    async def behind(frames: Frames, context: grpc.aio.ServicerContext) -> Any:
        async with _errors_as_status(context), ask(frames, context) as data:
            return await serve(_parsed(data, handler.request_deserializer), context)

    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return make(behind, response_serializer=handler.response_serializer)


async def next_message(frames: Frames, turns: Turns) -> bytes | None:
    """None: there are no more. Raises as `Turns.turn`."""
    async with turns.turn():
        return await anext(aiter(frames), None)


async def only_message(frames: Frames, turns: Turns) -> bytes:
    """InvalidArgument where there is none."""
    data = await next_message(frames, turns)
    if data is None:
        raise InvalidArgument("the call has no message")
    return data


class OpenServices(grpc.aio.ServerInterceptor):
    """Health and reflection, which anybody may ask: in few words, and so many at a time."""

    def __init__(self) -> None:
        self._turns = Turns(OPEN_TURNS, patience_s=OPEN_PATIENCE_S, hurried_s=OPEN_HURRIED_S)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(OPEN_SERVICES):
            return handler
        return self._streaming(handler) if handler.request_streaming else asking(handler, self._ask)

    @contextlib.asynccontextmanager
    async def _ask(self, frames: Frames, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        del context
        yield _short(await only_message(frames, self._turns))

    def _streaming(self, handler: Any) -> grpc.RpcMethodHandler:
        async def requests(frames: Frames) -> AsyncIterator[Any]:
            while (data := await next_message(frames, self._turns)) is not None:
                yield _parsed(_short(data), handler.request_deserializer)

        async def behind(frames: Frames, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with _errors_as_status(context):
                async for answer in handler.stream_stream(requests(frames), context):
                    yield answer

        return grpc.stream_stream_rpc_method_handler(behind, response_serializer=handler.response_serializer)


@contextlib.asynccontextmanager
async def _errors_as_status(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    try:
        yield
    except RequestError as error:
        await abort(context, error)


def _short(data: bytes) -> bytes:
    if len(data) > OPEN_BYTES:
        raise TooLarge(f"the message has {len(data)} bytes, the limit is {OPEN_BYTES}")
    return data


def _parsed(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidArgument(f"the message cannot be read: {error}") from error
