"""The worker's gRPC face: `Link` streams to gateways, and `Inspect` for whoever asks how it is.

A link is answered with Welcome once the model is ready. When its stream ends, for whatever reason, its requests are
cancelled. What is queued for a gateway is bounded by what its requests may still produce.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.status import FailedPrecondition, InvalidArgument, RequestError, Unavailable, abort
from moonshard.serving.worker import Worker

LOAD_PERIOD_S = 0.25  # metrics and routing lag by no more where no step says how things are: after a cancel, above all

logger = logging.getLogger(__name__)


class LinkSession:
    """One stream's outgoing side."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[link_pb2.WorkerMessage | None] = asyncio.Queue()  # None: the gateway has left

    def send(self, message: link_pb2.WorkerMessage) -> None:
        self.outgoing.put_nowait(message)


class LinkServicer(link_pb2_grpc.WorkerServicer):
    """`worker` resolves once the model is compiled; until then links wait and inspection is refused."""

    def __init__(self, worker: asyncio.Future[Worker]):
        self._worker = worker

    async def Link(
        self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[link_pb2.WorkerMessage]:
        try:
            _check_hello(await anext(request_iterator, None))
        except RequestError as error:
            logger.warning("a gateway at %s is refused: %s", context.peer(), error.message)
            await abort(context, error)
        worker, session = await asyncio.shield(self._worker), LinkSession()
        worker.open_link(session)
        reader = asyncio.create_task(_read(request_iterator, worker, session))
        reporter = asyncio.create_task(_report_load(worker, session))
        try:
            while (message := await session.outgoing.get()) is not None:
                yield message
            await reader  # a fault in reading ends the stream with it
        finally:
            reader.cancel()
            reporter.cancel()
            worker.close_link(session)

    async def Inspect(self, request: link_pb2.InspectRequest, context: grpc.aio.ServicerContext) -> link_pb2.Inspection:
        del request
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


async def _read(messages: AsyncIterator[link_pb2.GatewayMessage], worker: Worker, session: LinkSession) -> None:
    """Until the gateway ends its side or the stream breaks: either ends the session."""
    try:
        async for message in messages:
            worker.receive(message, session)
    finally:
        session.outgoing.put_nowait(None)


async def _report_load(worker: Worker, session: LinkSession) -> None:
    """Every step says it too; an idle worker has no steps."""
    while True:
        await asyncio.sleep(LOAD_PERIOD_S)
        if session.outgoing.empty():  # a gateway that does not read is not told the same thing for ever
            session.send(link_pb2.WorkerMessage(load=worker.load(session)))
