"""The gateway's end of a `Link`: one stream to one worker that carries all of its requests, for ever reconnected.

Apart from the pool, so that this file knows nothing of routing and the pool nothing of gRPC. A step's message is taken
apart here: each request waits on an inbox of its own, so that one slow client holds up no other. An inbox is bounded by
its request (`n` times `max_tokens`). Losing the stream ends every request on it; none is continued elsewhere yet.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.status import FailedPrecondition, RequestError, Unavailable, error_from_code

LOST_RETRY_AFTER_S = 1.0
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 2.0
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # a peer that vanished without a FIN is noticed within 15 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a fresh attempt must not inherit the last one's back-off
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # a proxy variable meant for the web must not swallow the worker's address
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request's share of a step, stamped when the step reached this process."""

    arrived_ns: int
    output: link_pb2.SequenceOutput


type Inbox = asyncio.Queue[Arrival | RequestError]


@dataclass(slots=True)
class Session:
    """One life of the stream: from a worker's Welcome to the stream's end."""

    welcome: link_pb2.Welcome
    load: link_pb2.WorkerLoad = field(default_factory=link_pb2.WorkerLoad)
    outgoing: asyncio.Queue[link_pb2.GatewayMessage] = field(default_factory=asyncio.Queue)
    inboxes: dict[bytes, Inbox] = field(default_factory=dict)

    def run(self, run: link_pb2.Run) -> Inbox:
        """Send a request. Whoever calls this calls `close` exactly once, however the request ends."""
        inbox: Inbox = asyncio.Queue()
        self.inboxes[run.request_id] = inbox
        self.outgoing.put_nowait(link_pb2.GatewayMessage(run=run))
        return inbox

    def close(self, request_id: bytes, *, cancel: bool) -> None:
        """Forget a request; `cancel` tells the worker to stop it. What still arrives for it is dropped."""
        if self.inboxes.pop(request_id, None) is not None and cancel:
            self.outgoing.put_nowait(link_pb2.GatewayMessage(cancel=link_pb2.Cancel(request_id=request_id)))

    def fail_all(self, error: RequestError) -> None:
        for inbox in self.inboxes.values():
            inbox.put_nowait(error)

    def receive(self, message: link_pb2.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "step":
                self.load = message.step.load
                self._deliver(message.step)
            case "load":
                self.load = message.load
            case "failed":
                self._fail(message.failed)

    def _deliver(self, step: link_pb2.StepOutput) -> None:
        arrived_ns = time.perf_counter_ns()
        for output in step.outputs:
            if (inbox := self.inboxes.get(output.request_id)) is not None:
                inbox.put_nowait(Arrival(arrived_ns, output))

    def _fail(self, failed: link_pb2.Failed) -> None:
        if (inbox := self.inboxes.get(failed.request_id)) is not None:
            inbox.put_nowait(error_from_code(failed.code, failed.message, failed.field, failed.retry_after_s))


class WorkerLink:
    """Keeps a session with the worker at `address`. `session` is None while there is none.

    `accept` looks at a Welcome and names what does not fit (None: all does); `on_change` is called when `session`
    changes, `on_load` after each message of a worker.
    """

    def __init__(
        self,
        address: str,
        *,
        epoch: bytes,
        accept: Callable[[link_pb2.Welcome], str | None],
        on_change: Callable[["WorkerLink"], None],
        on_load: Callable[["WorkerLink"], None],
    ) -> None:
        self.address = address
        self.session: Session | None = None
        self.num_restarts = 0  # a Welcome with another epoch than the last one's
        self.last_load = link_pb2.WorkerLoad()  # this and the next outlive the session, for the metrics
        self.num_blocks = 0  # per partition
        self._hello = link_pb2.Hello(protocol_version=PROTOCOL_VERSION, gateway_epoch=epoch)
        self._accept = accept
        self._on_change = on_change
        self._on_load = on_load
        self._worker_epoch = b""
        self._trouble = ""  # why there is no session, as last logged

    async def run(self) -> None:
        """Connect, serve and connect again until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await self._serve_session()
            except Exception as error:  # whatever it was, the next attempt may succeed
                reason = _reason(error)
                if self.session is not None:
                    retry_s = FIRST_RETRY_S
                if reason != self._trouble:  # said once, not once per attempt
                    logger.warning("worker %s: %s", self.address, reason, exc_info=_unexpected(error))
                    self._trouble = reason
            finally:
                self._lose()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _serve_session(self) -> None:
        """One session; returns or raises when it is over."""
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            call = link_pb2_grpc.WorkerStub(channel).Link()
            await call.write(link_pb2.GatewayMessage(hello=self._hello))
            session = Session(self._judge(await _read(call)))
            self.session = session
            if self._trouble:  # said as loudly as the trouble was
                logger.warning("worker %s: connected again", self.address)
                self._trouble = ""
            self._on_change(self)
            writer = asyncio.create_task(_write_all(call, session))
            try:
                while True:
                    session.receive(await _read(call))
                    self.last_load = session.load
                    self._on_load(self)
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def _judge(self, message: link_pb2.WorkerMessage) -> link_pb2.Welcome:
        welcome = message.welcome
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"speaks protocol version {welcome.protocol_version}, this gateway {PROTOCOL_VERSION}",
                field="protocol_version",
            )
        if (mismatch := self._accept(welcome)) is not None:
            raise FailedPrecondition(mismatch)
        self.num_restarts += self._worker_epoch not in (b"", welcome.epoch)
        self._worker_epoch, self.num_blocks = welcome.epoch, welcome.num_blocks
        return welcome

    def _lose(self) -> None:
        """End the session, if there is one, and every request on it."""
        session, self.session = self.session, None
        if session is None:
            return
        session.fail_all(Unavailable(f"the worker at {self.address} went away", retry_after_s=LOST_RETRY_AFTER_S))
        self._on_change(self)


async def _read(call: grpc.aio.StreamStreamCall) -> link_pb2.WorkerMessage:
    message = await call.read()
    if isinstance(message, link_pb2.WorkerMessage):
        return message
    raise Unavailable(await call.details() or "the worker ended the stream")


async def _write_all(call: grpc.aio.StreamStreamCall, session: Session) -> None:
    """A failed write needs no report: the read beside it fails with the reason."""
    while True:
        await call.write(await session.outgoing.get())


def _reason(error: Exception) -> str:
    if isinstance(error, RequestError):
        return error.message
    return (error.details() if isinstance(error, grpc.aio.AioRpcError) else None) or repr(error)


def _unexpected(error: Exception) -> Exception | None:
    """The error itself, for its traceback, unless it is one that a wire brings about."""
    return None if isinstance(error, RequestError | grpc.RpcError | asyncio.InvalidStateError) else error
