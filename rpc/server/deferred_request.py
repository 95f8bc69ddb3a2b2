"""Read a call's request message only when the method asks for it.

gRPC's unary handlers read and parse the message before the method runs. A stream handler is the same on the wire, and
reads nothing until asked; until then at most one HTTP/2 window of the message has arrived. Who may call, and how large
a message may be, is for the caller's `read` to check.
Source: gRPC over HTTP/2, "Requests".
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from moonshard.rpc.server.receive_limiter import ReceiveLimiter
from moonshard.rpc.status import InvalidArgument, RequestError, abort

type Frames = AsyncIterator[bytes]


class ReceivedMessage:
    """Bytes that are taken once, so that nobody keeps them for as long as the call lasts."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self) -> bytes:
        data, self._data = self._data, b""
        return data


type ReadRequest = Callable[[Frames, grpc.aio.ServicerContext], AbstractAsyncContextManager[ReceivedMessage]]


def deferred(handler: Any, read: ReadRequest) -> grpc.RpcMethodHandler:
    """The method of `handler`, which takes one message, served within `read`'s block.

    A method that streams its responses must be a coroutine that writes them, not a generator. RequestErrors of `read`
    and of the method end the call with their status.
    """
    serve = handler.unary_stream or handler.unary_unary

    async def served(frames: Frames, context: grpc.aio.ServicerContext) -> Any:
        async with errors_as_status(context), read(frames, context) as message:
            return await serve(parsed(message.take(), handler.request_deserializer), context)

    async def behind(messages: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            async with contextlib.aclosing(aiter(messages)) as frames:  # open, it and the call would hold each other
                return await served(frames, context)
        except grpc.aio.AbortError as ended:
            raise _without_frames(ended) from None

    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return make(behind, response_serializer=handler.response_serializer)


def _without_frames(ended: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """The error without its frames: gRPC's call keeps it, and the frames would keep the message, until the garbage
    collector runs.
    """
    ended.__context__ = None
    return ended.with_traceback(None)


async def next_message(frames: Frames, limiter: ReceiveLimiter) -> bytes | None:
    """The next message; None where there are no more. Raises as `ReceiveLimiter.receiving`."""
    async with limiter.receiving():
        return await anext(aiter(frames), None)


async def only_message(frames: Frames, limiter: ReceiveLimiter) -> bytes:
    """InvalidArgument where there is none."""
    data = await next_message(frames, limiter)
    if data is None:
        raise InvalidArgument("the call has no message")
    return data


def parsed(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    """InvalidArgument, of the field `message`, for bytes that are none."""
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidArgument(f"the message cannot be read: {error}", field="message") from error


@contextlib.asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """RequestErrors of the block end the call."""
    try:
        yield
    except RequestError as error:
        await abort(context, error)
