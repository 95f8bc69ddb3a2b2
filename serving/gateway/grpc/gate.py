"""What a gRPC call passes before its message is parsed: the caller's key, bounds on the message, and the time it takes.

This is what `intake.bounds` and `http.edge` do for HTTP. What a message means is `front`'s.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from moonshard.rpc.server.deferred_request import Frames, ReceivedMessage, deferred, only_message
from moonshard.rpc.server.receive_limiter import ReceiveLimiter
from moonshard.rpc.status import InvalidArgument
from moonshard.rpc.wire_fields import FieldCounts, count_fields
from moonshard.serving.config.tenants import Tenants
from moonshard.serving.gateway.aside import Aside
from moonshard.serving.gateway.caller import check_key, metadata_value
from moonshard.serving.gateway.intake.bounds import PROTO_BYTES_PER_TEXT_BYTE, Bounds, Intake
from moonshard.serving.gateway.intake.json_marks import Contents

MAX_FIELDS = 1 << 14  # messages, calls, tools, and numbers where they are not packed: each is built, again and again


@dataclass(frozen=True, slots=True)
class _Method:
    """What a method's messages are: their type, and how many times the context their text may be."""

    request: Descriptor
    num_contexts: int


class GrpcGate(grpc.aio.ServerInterceptor):
    """The gate before the methods of `service`.

    `num_contexts`: by method, how many times the context its text may be; 1 where it does not say. `json_names`: full
    names of the fields that the service decodes as JSON.
    """

    def __init__(
        self,
        service: ServiceDescriptor,
        intake: Intake,
        tenants: Tenants,
        limiter: ReceiveLimiter,
        aside: Aside,
        num_contexts: Mapping[str, int],
        json_names: frozenset[str],
    ) -> None:
        self._methods = {
            f"/{service.full_name}/{method.name}": _Method(method.input_type, num_contexts.get(method.name, 1))
            for method in service.methods
        }
        self._intake = intake
        self._tenants = tenants
        self._limiter = limiter
        self._aside = aside
        self._json_names = json_names

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = self._methods.get(str(handler_call_details.method))
        return handler if handler is None or method is None else deferred(handler, partial(self._read, method))

    @contextlib.asynccontextmanager
    async def _read(
        self, method: _Method, frames: Frames, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ReceivedMessage]:
        """The message, which counts as in flight during the block. Raises as key, limiter and bounds do."""
        check_key(self._tenants, metadata_value(context))
        share, admit = self._intake.admission(method.num_contexts, PROTO_BYTES_PER_TEXT_BYTE)
        try:
            data = await only_message(frames, self._limiter)
            admit(len(data))
            found = await self._aside.run(len(data), self._counts_in_bounds, data, method, self._intake.bounds())
            share.grow_to_hold(len(data), Contents(num_objects=found.num_fields, num_values=found.num_packed))
            taken = ReceivedMessage(data)
            del data
            yield taken
        finally:
            share.give_back()

    def _counts_in_bounds(self, data: bytes, method: _Method, bounds: Bounds) -> FieldCounts:
        """How many fields and packed numbers it has.

        Raises:
            InvalidArgument: too many fields, or bytes that are no message: they are not parsed to find out.
            ContextLengthExceeded: more numbers than token ids could be served.
            Unavailable: no worker has told yet how many could be.
        """
        try:
            found = count_fields(data, method.request, MAX_FIELDS, self._json_names)
        except DecodeError as error:
            raise InvalidArgument(f"the message cannot be read: {error}", field="message") from error
        if found.num_fields > MAX_FIELDS:
            raise InvalidArgument(
                f"the message has more than {MAX_FIELDS} fields, counting those of what is in it and schemas' values",
                field="message",
            )
        if found.num_packed > bounds.max_values(method.num_contexts):
            raise bounds.too_many_values("the message", method.num_contexts)
        return found
