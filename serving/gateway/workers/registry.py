"""The gateway's end of a registration: workers say where they are, and the pool keeps links to those that renew that.

Only who holds the cluster's key is heard (`rpc.server.door`), at a port that clients have no business at. Which
registrations count is decided in `control.members.roster`. What a worker says of itself is looked at here so that one
that does not fit hears it at once; what counts is what its link then hears.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.addresses import is_address
from moonshard.rpc.link import EPOCH_BYTES
from moonshard.rpc.server.seldom import Seldom
from moonshard.rpc.server.server import BoundServer, build_server
from moonshard.rpc.status import (
    FailedPrecondition,
    InvalidArgument,
    Overloaded,
    RequestError,
    RequestTimeout,
    Unavailable,
    abort,
)
from moonshard.rpc.tls import TlsFiles
from moonshard.serving.control.members.roster import LEASE_TICKS, Full, Roster, Taken
from moonshard.serving.gateway.workers.pool import LinkPool

SERVICE = link_pb2.DESCRIPTOR.services_by_name["Registry"]
MAX_WORKERS = 1024
MAX_ADDRESS_CHARS = 261  # a name of DNS, a colon and a port
MAX_MESSAGE_BYTES = 1 << 20  # of a Welcome with the layout of thousands of devices
MAX_NOTICES = 64  # of one worker in the time of a lease, where 4 are needed
MAX_REGISTRATIONS = 16 * MAX_WORKERS  # of all together, likewise: who is refused asks again every second
RETRY_AFTER_S = 1.0
ANNOUNCED_WITHIN_S = 10.0  # of being let in
SPEAKS_WITHIN_S = 0.5  # a worker that is there: it does so four times a second
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]")  # a name or an IP address, and no scheme of gRPC's targets

logger = logging.getLogger(__name__)


class Registry(link_pb2_grpc.RegistryServicer):
    """Adds to a pool who registers, and removes who says goodbye or lets its lease of `lease_s` end."""

    def __init__(self, pool: LinkPool, *, lease_s: float) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._roster = Roster(MAX_WORKERS)
        self._registrations = _Rate(MAX_REGISTRATIONS, lease_s)
        self._seldom = Seldom()

    async def watch(self) -> None:
        """Ends leases until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / LEASE_TICKS)
            for address in self._roster.tick():
                logger.warning("worker %s: did not renew its registration for %g s", address, self._lease_s)
                try:
                    self._pool.remove(address)
                except Exception:  # whatever it was, the other leases are to end too
                    logger.exception("worker %s: could not be forgotten", address)

    async def Register(
        self, request_iterator: AsyncIterator[link_pb2.WorkerNotice], context: grpc.aio.ServicerContext
    ) -> None:
        who = str(context.peer()).rpartition(":")[0]
        try:
            self._registrations.count()
            announced = _announcement(await _first(request_iterator))
            who, epoch = announced.address, int.from_bytes(announced.welcome.epoch, "big")
            await self._claim(announced.address, epoch)
            self._admit(announced, epoch)
            await context.write(link_pb2.Lease(lease_s=self._lease_s))
            await self._follow(request_iterator, announced.address, epoch)
        except RequestError as error:
            self._log(who, error)
            await abort(context, error)

    async def _claim(self, address: str, epoch: int) -> None:
        """FailedPrecondition where another process has the address, and speaks. Not at once: that it has ended may not
        have been noticed yet, and what it said before may be read only now.
        """
        session = self._pool.session_at(address)
        if session is None or session.epoch == epoch:
            return
        await asyncio.sleep(SPEAKS_WITHIN_S)
        num_received = session.num_received
        await asyncio.sleep(SPEAKS_WITHIN_S)
        if session.num_received > num_received and not session.is_lost:
            raise FailedPrecondition(f"another process answers at {address}", field="address")

    def _admit(self, announced: link_pb2.Announcement, epoch: int) -> None:
        """The worker is registered from now on. Raises the error that refuses it."""
        address = announced.address
        if (misfit := self._pool.knowledge.misfit(address, announced.welcome)) is not None:
            raise misfit
        session = self._pool.session_at(address)
        refusal = self._roster.register(address, epoch, answering=None if session is None else session.epoch)
        if isinstance(refusal, Taken):
            raise Unavailable(f"another process was at {address} just now", retry_after_s=RETRY_AFTER_S)
        if isinstance(refusal, Full):
            raise Overloaded(
                f"{refusal.max_workers} workers have registered, the most there may be", retry_after_s=RETRY_AFTER_S
            )
        self._pool.call(address)

    async def _follow(self, notices: AsyncIterator[link_pb2.WorkerNotice], address: str, epoch: int) -> None:
        """Takes renewals until goodbye or the stream's end."""
        rate = _Rate(MAX_NOTICES, self._lease_s)
        async for notice in notices:
            rate.count()
            match notice.WhichOneof("notice"):
                case "renewal":
                    if not self._roster.renew(address, epoch):
                        raise Unavailable("the lease has ended, or another process has it", retry_after_s=RETRY_AFTER_S)
                case "goodbye":
                    if self._roster.leave(address, epoch):
                        self._pool.remove(address)
                    return
                case _:
                    raise InvalidArgument("a worker that has announced itself renews that or leaves", field="notice")

    def _log(self, who: str, error: RequestError) -> None:
        """Logs each worker and reason once a minute, since it asks again every second."""
        if self._seldom.may_say(who, error.message):
            logger.warning("worker %s: %s", who, error.message)


async def _first(notices: AsyncIterator[link_pb2.WorkerNotice]) -> link_pb2.WorkerNotice | None:
    try:
        async with asyncio.timeout(ANNOUNCED_WITHIN_S):
            return await anext(notices, None)
    except TimeoutError:
        raise RequestTimeout(f"nothing was announced within {ANNOUNCED_WITHIN_S:g} s") from None


def _announcement(notice: link_pb2.WorkerNotice | None) -> link_pb2.Announcement:
    """InvalidArgument for one that names no worker."""
    if notice is None or notice.WhichOneof("notice") != "announcement":
        raise InvalidArgument("a registration begins with an announcement", field="announcement")
    announced = notice.announcement
    is_plain = len(announced.address) <= MAX_ADDRESS_CHARS and _HOST.fullmatch(announced.address.rpartition(":")[0])
    if not (is_plain and is_address(announced.address)):
        raise InvalidArgument("the address of a worker is no host:port", field="address")
    if len(announced.welcome.epoch) != EPOCH_BYTES:
        raise InvalidArgument(f"the epoch of a worker has {EPOCH_BYTES} bytes", field="epoch")
    return announced


class _Rate:
    """Counts what comes within a time. Overloaded for more than `most`."""

    def __init__(self, most: int, period_s: float) -> None:
        self._most = most
        self._period_s = period_s
        self._begun_s = time.monotonic()
        self._num = 0

    def count(self) -> None:
        now_s = time.monotonic()
        if now_s - self._begun_s >= self._period_s:
            self._begun_s, self._num = now_s, 0
        self._num += 1
        if self._num > self._most:
            raise Overloaded(f"more than {self._most} in {self._period_s:g} s", retry_after_s=RETRY_AFTER_S)


def registry_server(registry: Registry, *, host: str, port: int, key: bytes, tls: TlsFiles | None) -> BoundServer:
    """Raises as `build_server`."""
    return build_server(
        host=host,
        port=port,
        add_servicers=[lambda server: link_pb2_grpc.add_RegistryServicer_to_server(registry, server)],
        service_names=[SERVICE.full_name],
        tls=tls,
        key=key,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


@asynccontextmanager
async def serving_registry(registry: Registry, server: BoundServer) -> AsyncIterator[None]:
    """Workers may register inside the block."""
    await server.start()
    await server.set_serving(True)
    watching = asyncio.create_task(registry.watch(), name="registry")
    try:
        yield
    finally:
        watching.cancel()
        await server.stop(0)
