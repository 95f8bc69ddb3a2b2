"""The worker's gRPC face: `Link` streams to gateways, and `Inspect` for whoever asks how it is.

Both stand behind the door that lets in only who holds the cluster's key (`rpc.server.door`). A link is answered with
Welcome once the model is ready. When its stream ends, for whatever reason, its requests are cancelled. It ends with a
typed error where the gateway says what no gateway says, or does not read its answers: what waits for it is bounded. The
error comes behind what it did not read; by then it has no requests any more.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.status import FailedPrecondition, InvalidArgument, Overloaded, RequestError, Unavailable, abort

if TYPE_CHECKING:
    from moonshard.serving.worker.worker import Worker

SERVICE = link_pb2.DESCRIPTOR.services_by_name["Worker"]
LOAD_PERIOD_S = 0.25  # metrics and routing lag by no more where no step says how things are: after a cancel, above all
MAX_UNREAD_BYTES = 8 * 1024 * 1024  # minutes of the tokens of a full batch
MESSAGE_OVERHEAD_BYTES = 256  # of a message in the queue, however small

logger = logging.getLogger(__name__)


class LinkSession:
    """One stream's outgoing side, of encoded messages. Once more waits than `MAX_UNREAD_BYTES`, it has overflowed and
    takes no more.
    """

    def __init__(self) -> None:
        self.overflowed = asyncio.Event()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._news = asyncio.Event()
        self._has_ended = False

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def send(self, message: link_pb2.WorkerMessage) -> None:
        if self._num_bytes > MAX_UNREAD_BYTES:
            self._waiting.clear()
            self.overflowed.set()
            return
        encoded = message.SerializeToString()
        self._num_bytes += len(encoded) + MESSAGE_OVERHEAD_BYTES
        self._waiting.append(encoded)
        self._news.set()

    def end(self) -> None:
        """Takes no more; what waits is still sent."""
        self._has_ended = True
        self._news.set()

    async def send_all(self, context: grpc.aio.ServicerContext) -> None:
        """Sends what waits, until the session has ended."""
        while True:
            while self._waiting:
                encoded = self._waiting.popleft()
                self._num_bytes -= len(encoded) + MESSAGE_OVERHEAD_BYTES
                await context.write(encoded)
            if self._has_ended:
                return
            self._news.clear()
            await self._news.wait()


class LinkServicer(link_pb2_grpc.WorkerServicer):
    """`worker` resolves once the model is compiled; until then links wait and inspection is refused."""

    def __init__(self, worker: asyncio.Future["Worker"]):
        self._worker = worker

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service with a `Link` that writes bytes: a session encodes each message once, when it takes it."""
        inspect = grpc.stream_unary_rpc_method_handler(
            self.Inspect,
            request_deserializer=link_pb2.InspectRequest.FromString,
            response_serializer=link_pb2.Inspection.SerializeToString,
        )
        link = grpc.stream_stream_rpc_method_handler(
            self.Link, request_deserializer=link_pb2.GatewayMessage.FromString, response_serializer=None
        )
        handlers = {"Link": link, "Inspect": inspect}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))

    async def Link(
        self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            _check_hello(await anext(request_iterator, None))
        except RequestError as error:
            logger.warning("a gateway at %s is refused: %s", context.peer(), error.message)
            await abort(context, error)
        worker, session = await asyncio.shield(self._worker), LinkSession()
        worker.open_link(session)
        try:
            error = await _carry(request_iterator, context, worker, session)
        finally:
            worker.close_link(session)
        if error is not None:
            logger.warning("the link of a gateway at %s ends: %s", context.peer(), error.message)
            await abort(context, error)  # until a gateway that does not read does, or goes

    async def Inspect(
        self, request_iterator: AsyncIterator[link_pb2.InspectRequest], context: grpc.aio.ServicerContext
    ) -> link_pb2.Inspection:
        del request_iterator
        if not self._worker.done():
            await abort(context, Unavailable("the model is still loading", retry_after_s=1.0))
        return self._worker.result().inspect()


def _check_hello(message: link_pb2.GatewayMessage | None) -> None:
    if message is None or message.WhichOneof("message") != "hello":
        raise InvalidArgument("a link begins with hello", field="hello")
    version = message.hello.protocol_version
    if version != PROTOCOL_VERSION:
        raise FailedPrecondition(
            f"protocol_version is {version}; this worker speaks {PROTOCOL_VERSION}", field="protocol_version"
        )


async def _carry(
    requests: AsyncIterator[link_pb2.GatewayMessage],
    context: grpc.aio.ServicerContext,
    worker: "Worker",
    session: LinkSession,
) -> RequestError | None:
    """Reads and writes until either is over. Returns what ends the link, where that is a fault of the gateway."""
    reading = asyncio.create_task(_read(requests, worker, session))
    writing = asyncio.create_task(session.send_all(context))
    reporting = asyncio.create_task(_report_load(worker, session))
    overflow = asyncio.create_task(session.overflowed.wait())
    tasks = {reading, writing, overflow}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and reading.result() is None:  # the gateway has said all, and is still told all
            await asyncio.wait({writing, overflow}, return_when=asyncio.FIRST_COMPLETED)
        if overflow.done():
            return Overloaded(f"more than {MAX_UNREAD_BYTES} bytes of answers wait to be read", retry_after_s=1.0)
        return reading.result() if reading.done() else writing.result()
    finally:
        for task in (*tasks, reporting):
            task.cancel()
        await asyncio.gather(*tasks, reporting, return_exceptions=True)


async def _read(
    messages: AsyncIterator[link_pb2.GatewayMessage], worker: "Worker", session: LinkSession
) -> RequestError | None:
    """Until the gateway ends its side, the stream breaks, or a message is none that a gateway says."""
    try:
        async for message in messages:
            worker.receive(message, session)
    except RequestError as error:
        return error
    session.end()
    return None


async def _report_load(worker: "Worker", session: LinkSession) -> None:
    """Reports the load at intervals. Every step's message says it too, but an idle worker has no steps."""
    while True:
        await asyncio.sleep(LOAD_PERIOD_S)
        if session.is_empty:  # a gateway that does not read is not told the same thing for ever
            session.send(link_pb2.WorkerMessage(load=worker.load(session)))
