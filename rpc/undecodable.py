"""A message that cannot be read is its sender's fault: INVALID_ARGUMENT, where gRPC itself says INTERNAL or UNKNOWN.

gRPC reads a message before the method is asked and says what went wrong to nobody but its log. Here the fault is handed
on in the message's place, and the call ends with it.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from moonshard.rpc.status import InvalidArgument, abort

type Method = Callable[[Any, grpc.aio.ServicerContext], Any]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Where a message should be."""

    reason: str


class UndecodableRequests(grpc.aio.ServerInterceptor):
    """For every method of a server."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)  # None for a method that is not there
        return handler and _checking(handler)


def _checking(handler: Any) -> grpc.RpcMethodHandler:
    """The same method, which is asked for messages only."""
    read = handler.request_deserializer and _lenient(handler.request_deserializer)
    for kind, (make, checked) in _KINDS.items():
        method = getattr(handler, kind)
        if method is not None:
            return make(_guarded(method, checked), read, handler.response_serializer)
    return handler


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return Undecodable(str(error))

    return read


def _guarded(method: Method, checked: Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]) -> Method:
    """In the method's own form: gRPC looks whether it is a generator, or writes its answers."""
    if inspect.isasyncgenfunction(method):

        async def generating(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async for answer in method(await checked(request, context), context):
                yield answer

        return generating

    async def answering(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await method(await checked(request, context), context)

    return answering


async def _message(request: Any, context: grpc.aio.ServicerContext) -> Any:
    if isinstance(request, Undecodable):
        await abort(context, InvalidArgument(f"the message cannot be read: {request.reason}"))
    return request


async def _messages(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
    async def read() -> AsyncIterator[Any]:
        async for request in requests:
            yield await _message(request, context)

    return read()


_KINDS = {
    "unary_unary": (grpc.unary_unary_rpc_method_handler, _message),
    "unary_stream": (grpc.unary_stream_rpc_method_handler, _message),
    "stream_unary": (grpc.stream_unary_rpc_method_handler, _messages),
    "stream_stream": (grpc.stream_stream_rpc_method_handler, _messages),
}
