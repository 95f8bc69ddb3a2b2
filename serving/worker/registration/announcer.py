"""A worker's registration with one gateway: announced, renewed, announced again wherever it broke off, and ended.

Whoever answers proves first that it is of the cluster, and so does the worker (`rpc.server.door`). What the gateway
makes of it is `gateway.workers.registry`'s.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.link import CHANNEL_OPTIONS
from moonshard.rpc.server.door import open_stream
from moonshard.rpc.server.seldom import Seldom
from moonshard.rpc.server.trouble import reason
from moonshard.rpc.status import FailedPrecondition, RequestError, Unavailable, from_rpc_error
from moonshard.serving.worker.registration.places import Place

METHOD = f"/{link_pb2.DESCRIPTOR.services_by_name['Registry'].full_name}/Register"
RETRY_S = 0.5  # a gateway that has just come knows all its workers within a second
RENEWALS = 4  # in the time of a lease
MIN_RENEWAL_S = 0.05
GOODBYE_S = 1.0  # for a gateway to hear it
RENEWAL = link_pb2.WorkerNotice(renewal=link_pb2.Renewal())
GOODBYE = link_pb2.WorkerNotice(goodbye=link_pb2.Goodbye())

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """How a worker proves itself to gateways."""

    key: bytes = field(repr=False)  # the cluster's for proofs
    tls: grpc.ChannelCredentials | None  # None: plain text


class Announcer:
    """Keeps the worker of `announced` registered at `place` while `run` runs. `on_taken` hears, at each attempt, that
    the gateway reaches another process at the worker's address.
    """

    def __init__(
        self,
        place: Place,
        announced: link_pb2.Announcement,
        credentials: Credentials,
        on_taken: Callable[[str], None],
    ) -> None:
        self.is_registered = False
        self._place = place
        self._announcement = link_pb2.WorkerNotice(announcement=announced)
        self._credentials = credentials
        self._on_taken = on_taken
        self._seldom = Seldom()
        self._is_in_trouble = False  # and that was logged

    async def run(self, leaving: asyncio.Event) -> None:
        """Until `leaving` is set: then says goodbye where it is registered, and returns."""
        while not leaving.is_set():
            try:
                try:
                    await self._register(leaving)
                finally:
                    self.is_registered = False
            except Exception as error:  # whatever it was, the next attempt may succeed
                self._note(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leaving.wait(), RETRY_S)

    async def _register(self, leaving: asyncio.Event) -> None:
        """One stream; returns once goodbye was said, and raises where it broke off."""
        async with self._channel() as channel:
            port = 0 if self._credentials.tls else self._place.port
            call = await open_stream(channel, METHOD, self._credentials.key, port, link_pb2.Lease.FromString)
            await call.write(self._announcement)
            lease = await _read(call)
            self._begin()
            reading, stopping = asyncio.create_task(_read(call)), asyncio.create_task(leaving.wait())
            try:
                await _renew(call, reading, stopping, max(MIN_RENEWAL_S, lease.lease_s / RENEWALS))
                await _say_goodbye(call, reading)
            finally:
                for task in (reading, stopping):
                    task.cancel()
                await asyncio.gather(reading, stopping, return_exceptions=True)

    def _channel(self) -> grpc.aio.Channel:
        if self._credentials.tls is None:
            return grpc.aio.insecure_channel(self._place.address, options=CHANNEL_OPTIONS)
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", self._place.name))
        return grpc.aio.secure_channel(self._place.address, self._credentials.tls, options=options)

    def _begin(self) -> None:
        self.is_registered = True
        if self._is_in_trouble:  # said as loudly as the trouble was
            logger.warning("gateway %s: registered", self._place.address)
            self._is_in_trouble = False

    def _note(self, error: Exception) -> None:
        """Logs why it is not registered: once a minute, not once per attempt."""
        gateway, trouble = self._place.address, reason(error, has_tls=self._credentials.tls is not None)
        if isinstance(error, grpc.aio.AioRpcError):
            error = from_rpc_error(error)
        if self._seldom.may_say(trouble):
            is_expected = isinstance(error, RequestError | TimeoutError | asyncio.InvalidStateError)
            cause = None if is_expected else error
            logger.warning("gateway %s: not registered: %s", gateway, trouble, exc_info=cause)
            self._is_in_trouble = True
        if isinstance(error, FailedPrecondition) and error.field == "address":
            self._on_taken(f"gateway {gateway}: {trouble}")


async def _renew(
    call: grpc.aio.StreamStreamCall,
    reading: asyncio.Task[link_pb2.Lease],
    stopping: asyncio.Task[bool],
    period_s: float,
) -> None:
    """Renews until told to stop; raises the stream's end."""
    while not stopping.done():
        await asyncio.wait({reading, stopping}, timeout=period_s, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
            raise Unavailable("the gateway says what no gateway says")
        if not stopping.done():
            await call.write(RENEWAL)


async def _say_goodbye(call: grpc.aio.StreamStreamCall, reading: asyncio.Task[link_pb2.Lease]) -> None:
    """Waits for the stream's end, since a call that is broken off may lose the message."""
    await call.write(GOODBYE)
    await call.done_writing()
    await asyncio.wait({reading}, timeout=GOODBYE_S)


async def _read(call: grpc.aio.StreamStreamCall) -> link_pb2.Lease:
    message = await call.read()
    if isinstance(message, link_pb2.Lease):
        return message
    raise Unavailable(await call.details() or "the gateway ended the registration")
