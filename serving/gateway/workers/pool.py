"""The links to a gateway's workers, kept up as long as it runs, and who waits for one to come or go.

Where workers may be is listed at the start, or said later (`call`, `remove`). What workers say goes to `knowledge`, and
from there to the control plane, which decides who is routed to. A worker that does not fit is told so, logged, not
routed to, and asked again later.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError, Unavailable
from moonshard.serving.control.members.fleet import DECODE_ROLES, ModelLimits
from moonshard.serving.control.routing.router import Home
from moonshard.serving.gateway.workers.knowledge import Knowledge
from moonshard.serving.gateway.workers.link import LOST_RETRY_AFTER_S, LinkConfig, LinkEvents, WorkerLink
from moonshard.serving.gateway.workers.session import WorkerSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolEvents:
    """What a pool tells, and to whom. None of these methods may block."""

    on_load: Callable[[int, link_pb2.WorkerLoad], None]  # after each message of a worker, by its index
    on_handoff: Callable[[WorkerSession, link_pb2.WorkerMessage], None]  # what a worker says of a handoff
    on_lost: Callable[[WorkerSession], None]  # a session ended; before its requests are failed
    on_removed: Callable[[int], None] = lambda _index: None  # a worker's index may be another one's from now on


class LinkPool:
    """Links to `addresses`, and to those that are added. What is asked for each message or request takes no look at
    every link.

    `links` are in the order of their indices. A worker has its index for as long as its address is one of the pool's;
    an address that is added gets the first that is free.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        knowledge: Knowledge,
        events: PoolEvents,
        *,
        silence_s: float,
        key: bytes,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.knowledge = knowledge
        self._fleet = knowledge.dispatcher.fleet
        self._router = knowledge.dispatcher.router
        self._events = events
        self._ready, self._not_ready, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._not_ready.set()
        self._config = LinkConfig(
            gateway_epoch=secrets.token_bytes(16), key=key, silence_s=silence_s, credentials=credentials
        )
        self._link_events = LinkEvents(
            accept=knowledge.misfit,
            on_change=self._session_changed,
            on_load=self._link_loaded,
            on_handoff=events.on_handoff,
            on_prefixes=knowledge.prefixes,
            on_lost=self._lost,
        )
        self.links = tuple(WorkerLink(address, self._config, self._link_events) for address in addresses)
        self._index = {link.address: index for index, link in enumerate(self.links)}
        self._by_address = {link.address: link for link in self.links}
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}  # while running; those of removed links until they end

    @contextlib.asynccontextmanager
    async def running(self):
        """Keep all links up inside the block."""
        for link in self.links:
            self._run(link)
        try:
            yield self
        finally:
            tasks = tuple(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def call(self, address: str) -> None:
        """Keep a link to this address too. Where there is one that waits before it tries again, it tries now."""
        if (link := self._by_address.get(address)) is not None:
            link.hurry()
        else:
            self._add(address)

    def _add(self, address: str) -> None:
        self.knowledge.expect(address)
        link = WorkerLink(address, self._config, self._link_events)
        self._index[address], self._by_address[address] = _first_free(self._index.values()), link
        self.links = tuple(sorted(self._by_address.values(), key=lambda link: self._index[link.address]))
        self._run(link)

    def remove(self, address: str) -> None:
        """End the link to this address, and at once every request on it. KeyError where it is not one of the pool's."""
        link, index = self._by_address.pop(address), self._index[address]
        self.links = tuple(self._by_address[each.address] for each in self.links if each is not link)
        link.lose()
        del self._index[address]
        self._tasks[link].cancel()
        self.knowledge.forget(address)
        self._events.on_removed(index)

    def move(self, addresses: Sequence[str]) -> None:
        """Workers are at these addresses from now on, and nowhere else: a link to where one was ends with its requests,
        as that of a worker that is lost.
        """
        for address in self._by_address.keys() - set(addresses):
            self.remove(address)
        for address in addresses:
            if address not in self._by_address:
                logger.warning("worker %s: one has come back there", address)
                self._add(address)

    def session_at(self, address: str) -> WorkerSession | None:
        """The session with the worker there; None where there is none now."""
        link = self._by_address.get(address)
        return None if link is None else link.session

    def _run(self, link: WorkerLink) -> None:
        task = asyncio.create_task(link.run(), name=f"link {link.address}")
        self._tasks[link] = task
        task.add_done_callback(lambda _: self._tasks.pop(link))

    @property
    def limits(self) -> ModelLimits | None:
        """None while no worker is there."""
        return self._fleet.limits

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served."""
        return self._fleet.is_ready

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def wait_not_ready(self) -> None:
        await self._not_ready.wait()

    async def wait_complete(self, timeout_s: float) -> bool:
        """Until there is a worker for each leg of a request, or the time is over: one that decodes can do both.

        False as soon as nobody decodes.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.is_ready and not self._fleet.is_complete:
                    await self._changed.wait()
        return self.is_ready

    async def wait_changed(self, timeout_s: float) -> bool:
        """Until a worker has come or gone, or has begun or ended to drain; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def index_of(self, address: str) -> int:
        """The worker's index, as metrics name it."""
        return self._index[address]

    def in_flight_tokens(self, address: str) -> int:
        return self._router.worker_tokens(address)

    def num_known_blocks(self, address: str, partition: int) -> int:
        """How many blocks the worker said that it has in its prefix cache."""
        return self._router.num_known_blocks(Home(address, partition))

    def unavailable(self) -> Unavailable:
        """The error of a request that no worker can take, with what is wrong with each."""
        reasons = "; ".join(f"{link.address}: {_reason(link)}" for link in self.links) or "none has registered"
        return Unavailable(f"no worker is ready ({reasons})", retry_after_s=LOST_RETRY_AFTER_S)

    def worker_states(self) -> dict[str, str]:
        """The state of each worker by its address: `ready`, `draining`, or why there is no link to it."""
        return {link.address: _state(link) for link in self.links}

    def fail_all(self, error: RequestError) -> None:
        for link in self.links:
            if link.session is not None:
                link.session.fail_all(error)

    def _lost(self, session: WorkerSession) -> None:
        self.knowledge.end(session)
        self._events.on_lost(session)

    def _link_loaded(self, link: WorkerLink) -> None:
        if link.session is None:  # removed while its last message was taken
            return
        if self.knowledge.loaded(link.session):
            self._notice()
        self._events.on_load(self._index[link.address], link.last_load)

    def _session_changed(self, link: WorkerLink) -> None:
        if link.session is not None:
            self.knowledge.begin(link.session)
        self._notice()

    def _notice(self) -> None:
        """Tells that the set of routable workers has changed."""
        became, was = (self._ready, self._not_ready) if self.is_ready else (self._not_ready, self._ready)
        became.set()
        was.clear()
        self._changed.set()  # whoever waits now; the next change has an event of its own
        self._changed = asyncio.Event()


def _first_free(taken: Iterable[int]) -> int:
    """The smallest number of 0, 1, ... that is none of these."""
    among = set(taken)
    return next(index for index in range(len(among) + 1) if index not in among)


def _state(link: WorkerLink) -> str:
    if link.session is None:
        return link.trouble
    return "draining" if link.session.load.draining else "ready"


def _reason(link: WorkerLink) -> str:
    """Why the worker takes no new requests for decoding."""
    is_prefill = link.session is not None and link.session.role not in DECODE_ROLES
    return "only prefills" if is_prefill else _state(link)
