"""The gateway's end of a `Link`: one stream to one worker that carries all of its requests, for ever reconnected.

It knows nothing of routing, as `pool` knows nothing of gRPC. A worker proves that it is of the cluster before it is
told anything: whoever took a port is sent no prompt. Losing the stream ends every request on it; whether one is
continued elsewhere is decided where requests are. A worker from which nothing comes for a while (it speaks four times a
second) is treated as lost: a stopped process keeps its connections.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.link import CHANNEL_OPTIONS, PROTOCOL_VERSION
from moonshard.rpc.server import trouble
from moonshard.rpc.server.door import open_stream
from moonshard.rpc.status import FailedPrecondition, Unavailable
from moonshard.serving.gateway.workers.session import WorkerSession

METHOD = f"/{link_pb2.DESCRIPTOR.services_by_name['Worker'].full_name}/Link"
LOST_RETRY_AFTER_S = 2.0  # a small model's worker is back by then or soon after
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 2.0
SILENT_TICKS = 8  # silence is counted in ticks: a stall of this process is one tick, and no silence of the worker's
REFUSED_TIMEOUT_S = 1.0  # for a worker to hear why

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkConfig:
    """What all links of a gateway have in common."""

    gateway_epoch: bytes
    key: bytes = field(repr=False)  # a worker that has not the same is none of ours
    silence_s: float  # then a worker is treated as lost
    credentials: grpc.ChannelCredentials | None  # None: plain text


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEvents:
    """What a link asks of the gateway and tells it. None of these methods may block."""

    accept: Callable[[str, link_pb2.Welcome], FailedPrecondition | None]  # what does not fit of the one there
    on_change: Callable[["WorkerLink"], None]  # `session` is another one, or none
    on_load: Callable[["WorkerLink"], None]  # after each message of the worker
    on_handoff: Callable[[WorkerSession, link_pb2.WorkerMessage], None]
    on_prefixes: Callable[[WorkerSession, link_pb2.WorkerMessage], None]
    on_lost: Callable[[WorkerSession], None]  # before its requests are failed


class WorkerLink:
    """Keeps a session with the worker at `address`. `session` is None while there is none, and `trouble` says why."""

    def __init__(self, address: str, config: LinkConfig, events: LinkEvents) -> None:
        self.address = address
        self.session: WorkerSession | None = None
        self.trouble = "not connected yet"
        self.num_restarts = 0  # a Welcome with another epoch than the last one's
        self.role = ""  # this and the next two outlive the session, for the metrics
        self.last_load = link_pb2.WorkerLoad()
        self.num_blocks = 0  # per partition
        self._config = config
        self._events = events
        self._worker_epoch = b""
        self._logged = ""  # the trouble that was logged last; empty after a session
        self._retry_s = FIRST_RETRY_S
        self._hurried = asyncio.Event()

    async def run(self) -> None:
        """Connect, serve and connect again until cancelled."""
        while True:
            try:
                try:
                    await self._connect()
                finally:
                    self.lose()
            except Exception as error:  # whatever it was, the next attempt may succeed
                self._note(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), self._retry_s)
            self._hurried.clear()
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def hurry(self) -> None:
        """A worker has just come there: does not wait before the next attempt."""
        self._retry_s = FIRST_RETRY_S
        self._hurried.set()

    async def _connect(self) -> None:
        """One session; returns or raises when it is over."""
        async with self._channel() as channel:
            port = 0 if self._config.credentials else int(self.address.rpartition(":")[2])
            call = await open_stream(channel, METHOD, self._config.key, port, link_pb2.WorkerMessage.FromString)
            hello = link_pb2.Hello(protocol_version=PROTOCOL_VERSION, gateway_epoch=self._config.gateway_epoch)
            await call.write(link_pb2.GatewayMessage(hello=hello))
            welcome = (await _read(call)).welcome
            if (fault := self._misfit(welcome)) is not None:
                await _refuse(call, fault)
                raise fault
            session = self._begin(welcome)
            tasks = [
                asyncio.create_task(self._read_all(call, session)),
                asyncio.create_task(_watch(session, self._config.silence_s)),
                asyncio.create_task(_write_all(call, session)),
            ]
            try:
                ended, _ = await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _channel(self) -> grpc.aio.Channel:
        if self._config.credentials is None:
            return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.address, self._config.credentials, options=CHANNEL_OPTIONS)

    def _misfit(self, welcome: link_pb2.Welcome) -> FailedPrecondition | None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            return FailedPrecondition(
                f"speaks protocol_version {welcome.protocol_version}, this gateway {PROTOCOL_VERSION}",
                field="protocol_version",
            )
        return self._events.accept(self.address, welcome)

    def _begin(self, welcome: link_pb2.Welcome) -> WorkerSession:
        self.num_restarts += self._worker_epoch not in (b"", welcome.epoch)
        self._worker_epoch, self.num_blocks, self.role = welcome.epoch, welcome.num_blocks, welcome.role
        self._retry_s = FIRST_RETRY_S
        if self._logged:  # said as loudly as the trouble was
            logger.warning("worker %s: connected again", self.address)
            self._logged = ""
        self.session = WorkerSession(
            address=self.address,
            welcome=welcome,
            on_handoff=self._events.on_handoff,
            on_prefixes=self._events.on_prefixes,
        )
        self._events.on_change(self)
        return self.session

    async def _read_all(self, call: grpc.aio.StreamStreamCall, session: WorkerSession) -> None:
        while True:
            message = await _read(call)
            session.receive(message)
            self.last_load = session.load
            self._events.on_load(self)
            await session.deliver(message.step)

    def lose(self) -> None:
        """End the session, if there is one, and every request on it."""
        session, self.session = self.session, None
        if session is None:
            return
        session.is_lost = True
        self.trouble = "went away"
        try:
            self._events.on_lost(session)
        finally:
            session.fail_all(Unavailable(f"the worker at {self.address} went away", retry_after_s=LOST_RETRY_AFTER_S))
            self._events.on_change(self)

    def _note(self, error: Exception) -> None:
        """Log why there is no session: once, not once per attempt."""
        self.trouble = trouble.reason(error, has_tls=self._config.credentials is not None)
        if self.trouble != self._logged:
            cause = None if trouble.is_expected(error) else error
            logger.warning("worker %s: %s", self.address, self.trouble, exc_info=cause)
            self._logged = self.trouble


async def _read(call: grpc.aio.StreamStreamCall) -> link_pb2.WorkerMessage:
    message = await call.read()
    if isinstance(message, link_pb2.WorkerMessage):
        return message
    raise Unavailable(await call.details() or "the worker ended the stream")


async def _write_all(call: grpc.aio.StreamStreamCall, session: WorkerSession) -> None:
    """A failed write needs no report: the read beside it fails with the reason."""
    while True:
        await call.write(await session.outgoing.get())


async def _watch(session: WorkerSession, silence_s: float) -> None:
    """Raises Unavailable when no message came for `silence_s`, or an eighth more."""
    num_silent = 0
    while num_silent < SILENT_TICKS:
        num_seen = session.num_received
        await asyncio.sleep(silence_s / SILENT_TICKS)
        num_silent = num_silent + 1 if session.num_received == num_seen else 0
    raise Unavailable(f"nothing came from it for {silence_s:g} s")


async def _refuse(call: grpc.aio.StreamStreamCall, fault: FailedPrecondition) -> None:
    """Tells the worker why and ends the stream; then waits for its end, since a call that is broken off may lose the
    message.
    """
    refused = link_pb2.Refused(field=fault.field or "", message=fault.message)
    try:
        async with asyncio.timeout(REFUSED_TIMEOUT_S):
            await call.write(link_pb2.GatewayMessage(refused=refused))
            await call.done_writing()
            while isinstance(await call.read(), link_pb2.WorkerMessage):
                pass
    except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
        return  # it hears it at the next attempt
