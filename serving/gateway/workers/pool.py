"""The workers of a gateway: which are there, that they agree, and which of them takes a request or a leg of one.

Workers must serve the same checkpoint in the same dtype and blocks: otherwise a request's tokens would depend on where
it ran, and its KV could not move. The first to be there sets the measure; one that differs is told so, logged, not
routed to, and asked again later.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.status import FailedPrecondition, RequestError, Unavailable
from moonshard.serving.control.routing.names import QUEUE_WEIGHT, PolicyName
from moonshard.serving.control.routing.pins import Pins
from moonshard.serving.control.routing.policies import policy_of
from moonshard.serving.control.routing.router import Ask, Home, Reservation, Router
from moonshard.serving.control.routing.ttft import TtftModel
from moonshard.serving.gateway.workers.knowledge import Knowledge, homes_of
from moonshard.serving.gateway.workers.link import LOST_RETRY_AFTER_S, LinkConfig, LinkEvents, WorkerLink
from moonshard.serving.gateway.workers.session import WorkerSession

PREFILL_ROLES = frozenset({"prefill"})
DECODE_ROLES = frozenset({"both", "decode"})
LEAST_TTFT_S = 0.1  # so long it is taken to stay what it is: under overload everybody is told of it
_AGREED = ("fingerprint", "dtype", "vocab_size", "block_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What the workers agree on, and the least of what each can hold."""

    fingerprint: str
    dtype: str
    vocab_size: int
    block_size: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, or a leg of it."""

    worker_index: int
    session: WorkerSession
    partition: int
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class _Fleet:
    """Workers to choose among."""

    sessions: Mapping[str, WorkerSession]  # by address
    homes: tuple[Home, ...]

    @classmethod
    def of(cls, sessions: Iterable[WorkerSession]) -> "_Fleet":
        by_address = {session.address: session for session in sessions}
        return cls(by_address, tuple(home for session in by_address.values() for home in homes_of(session)))


class LinkPool:
    """Links to `addresses`, and the tokens reserved on each. `on_load(index, load)` is called after every message.

    What is asked for each message or request is kept ready, so that it takes no look at every link.

    `on_handoff` and `on_lost` are for whoever runs handoffs: what a worker says of one, and that a session ended. Set
    them before `running`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        on_load: Callable[[int, link_pb2.WorkerLoad], None],
        silence_s: float,
        key: bytes,
        credentials: grpc.ChannelCredentials | None = None,
        policy: PolicyName = "cost",
        queue_weight: float = QUEUE_WEIGHT,
    ) -> None:
        self.on_handoff: Callable[[WorkerSession, link_pb2.WorkerMessage], None] = lambda _session, _message: None
        self.on_lost: Callable[[WorkerSession], None] = lambda _session: None
        self._on_load = on_load
        self._pins = Pins()
        self._router = Router(queue_weight=queue_weight, pins=self._pins)
        self._knowledge = Knowledge(self._router, self._pins)
        self._ttft = TtftModel()
        self._policy = policy_of(policy)
        self._ready, self._not_ready, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._not_ready.set()
        self.limits: ModelLimits | None = None  # while no worker is there
        self._by_epoch: dict[int, WorkerSession] = {}
        self._routable: dict[str, WorkerSession] = {}  # by address: those that are there and not draining
        self._least_ttft: tuple[float, float | None] = (-math.inf, None)  # when that was, and what
        self._fleets: dict[frozenset[str], _Fleet] = {}
        config = LinkConfig(
            gateway_epoch=secrets.token_bytes(16), key=key, silence_s=silence_s, credentials=credentials
        )
        events = LinkEvents(
            accept=self._misfit,
            on_change=self._session_changed,
            on_load=self._link_loaded,
            on_handoff=self._hand_over,
            on_prefixes=self._knowledge.prefixes,
            on_lost=self._lost,
        )
        self.links = tuple(WorkerLink(address, config, events) for address in addresses)
        self._index = {link.address: index for index, link in enumerate(self.links)}

    @asynccontextmanager
    async def running(self):
        """Keep all links up inside the block."""
        tasks = [asyncio.create_task(link.run(), name=f"link {link.address}") for link in self.links]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def block_size(self) -> int:
        """Of the workers that are there; 1 where there is none."""
        return 1 if self.limits is None else self.limits.block_size

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: a worker that decodes can prefill too."""
        return any(session.role in DECODE_ROLES for session in self._routable.values())

    @property
    def has_prefill(self) -> bool:
        return any(session.role in PREFILL_ROLES for session in self._routable.values())

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def wait_not_ready(self) -> None:
        await self._not_ready.wait()

    async def wait_changed(self, timeout_s: float) -> bool:
        """Until a worker can be routed to that could not be before, or no longer can; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def in_flight_tokens(self, address: str) -> int:
        return self._router.worker_tokens(address)

    def num_known_blocks(self, address: str, partition: int) -> int:
        """That the worker said can be found again."""
        return self._router.num_known_blocks(Home(address, partition))

    def knows(self, name: bytes) -> bool:
        """Whether some worker has said that it has this block."""
        return bool(self._router.index.num_known([name]))

    def session_of(self, epoch: int) -> WorkerSession | None:
        """The session with that process, if there is one now."""
        return self._by_epoch.get(epoch)

    @contextmanager
    def reserve_decode(self, ask: Ask, *, exclude: Collection[int] = ()) -> Iterator[Route]:
        """Hold the request's tokens on the worker chosen to decode it while the block runs.

        `exclude` are the epochs that failed it. Unavailable where no other worker is left, saying why of each.
        """
        with self._reserve(DECODE_ROLES, ask, exclude) as route:
            if route is None:
                raise self.unavailable(exclude)
            yield route

    @contextmanager
    def reserve_prefill(self, ask: Ask, *, exclude: Collection[int] = ()) -> Iterator[Route | None]:
        """Likewise on a worker that prefills for others; None where there is none."""
        with self._reserve(PREFILL_ROLES, ask, exclude) as route:
            yield route

    def sent(self, route: Route) -> None:
        """The request has just been sent to where it was reserved, or its leg."""
        self._knowledge.sent(route.session, route.reservation)
        self._router.sent(route.reservation, time.monotonic())

    def nothing_came(self, route: Route) -> None:
        """Of what was sent there, or was to be: a session that was to be there from then on is not."""
        kept = route.reservation
        if kept.affinity_key is not None and kept.affinity != "hit":
            self._pins.drop(kept.affinity_key, self._router.home_number(kept.home))

    def first_token(self, route: Route, num_prompt: int, ttft_s: float) -> None:
        """It came, that long after the request was sent."""
        kept = route.reservation
        self._ttft.observe(
            kept.home.worker,
            own_tokens=num_prompt - kept.num_known_tokens,
            queued_tokens=kept.num_queued_tokens,
            ttft_s=ttft_s,
        )

    def predict_ttft_s(self, route: Route, num_prompt: int, *, is_alone: bool = False) -> float | None:
        """From the sending of a request that is reserved there; None while too little was seen of that worker.

        `is_alone`: if nothing were queued.
        """
        kept = route.reservation
        return self._ttft.predict_s(
            kept.home.worker,
            own_tokens=num_prompt - kept.num_known_tokens,
            queued_tokens=0 if is_alone else kept.num_queued_tokens,
        )

    def least_ttft_s(self) -> float | None:
        """Of the shortest prompt, sent to where it would be soonest, a moment ago; None while nothing is known."""
        now_s = time.monotonic()
        if now_s - self._least_ttft[0] >= LEAST_TTFT_S:
            self._least_ttft = now_s, self._find_least_ttft_s()
        return self._least_ttft[1]

    def unavailable(self, exclude: Collection[int] = ()) -> Unavailable:
        """The error of a request that no worker can take, with what is wrong with each."""
        reasons = "; ".join(f"{link.address}: {_reason(link, exclude)}" for link in self.links)
        return Unavailable(f"no worker is ready ({reasons})", retry_after_s=LOST_RETRY_AFTER_S)

    def worker_states(self) -> dict[str, str]:
        """By address: `ready`, `draining`, or why there is no link to it."""
        return {link.address: _state(link) for link in self.links}

    def fail_all(self, error: RequestError) -> None:
        for session in self._sessions():
            session.fail_all(error)

    @contextmanager
    def _reserve(self, roles: Collection[str], ask: Ask, exclude: Collection[int]) -> Iterator[Route | None]:
        fleet = self._fleet(roles, exclude)
        reservation = self._router.reserve(fleet.homes, ask, policy=self._policy, now_s=time.monotonic())
        if reservation is None:
            yield None
            return
        home = reservation.home
        try:
            yield Route(self._index[home.worker], fleet.sessions[home.worker], home.partition, reservation)
        finally:
            self._router.release(reservation)

    def _find_least_ttft_s(self) -> float | None:
        homes = self._fleet(PREFILL_ROLES | DECODE_ROLES, ()).homes
        predicted = (
            self._ttft.predict_s(home.worker, own_tokens=1, queued_tokens=queued_tokens)
            for home, queued_tokens in zip(homes, self._router.queues(homes), strict=True)
        )
        return min((seconds for seconds in predicted if seconds is not None), default=None)

    def _fleet(self, roles: Collection[str], exclude: Collection[int]) -> _Fleet:
        """The workers of these roles that can be routed to; the same object as long as they are the same."""
        if exclude:
            return _Fleet.of(s for s in self._routable.values() if s.role in roles and s.epoch not in exclude)
        roles = frozenset(roles)
        if roles not in self._fleets:
            self._fleets[roles] = _Fleet.of(s for s in self._routable.values() if s.role in roles)
        return self._fleets[roles]

    def _sessions(self) -> list[WorkerSession]:
        return [link.session for link in self.links if link.session is not None]

    def _misfit(self, welcome: link_pb2.Welcome) -> FailedPrecondition | None:
        """Two addresses of one process would be two workers to the router, and one to a handoff."""
        if welcome.role not in PREFILL_ROLES | DECODE_ROLES:
            return FailedPrecondition(f"not routed to, role {welcome.role!r} is none", field="role")
        expected = self.limits
        if expected is None:
            return None
        for name in _AGREED:
            found, wanted = getattr(welcome, name), getattr(expected, name)
            if found != wanted:
                message = f"not routed to, {name} is {found!r} where the other workers have {wanted!r}"
                return FailedPrecondition(message, field=name)
        if (double := self.session_of(int.from_bytes(welcome.epoch, "big"))) is not None:
            return FailedPrecondition(f"not routed to, the same process as at {double.address}", field="epoch")
        return None

    def _hand_over(self, session: WorkerSession, message: link_pb2.WorkerMessage) -> None:
        self.on_handoff(session, message)  # whoever has set it since

    def _lost(self, session: WorkerSession) -> None:
        del self._by_epoch[session.epoch]
        self._ttft.forget(session.address)
        self._knowledge.end(session)
        self.on_lost(session)

    def _link_loaded(self, link: WorkerLink) -> None:
        if link.session is not None:
            self._knowledge.loaded(link.session)
        self._notice(link)  # `draining` may have begun or ended
        self._on_load(self._index[link.address], link.last_load)

    def _session_changed(self, link: WorkerLink) -> None:
        if link.session is not None:
            self._by_epoch[link.session.epoch] = link.session
            self._knowledge.begin(link.session)
        self.limits = _limits_of([session.welcome for session in self._sessions()])
        self._notice(link)

    def _notice(self, link: WorkerLink) -> None:
        """Whether this worker can be routed to has changed, or not: comes with every message."""
        if _routable(link) is self._routable.get(link.address):
            return
        found = ((each.address, _routable(each)) for each in self.links)
        self._routable = {address: session for address, session in found if session is not None}
        self._fleets.clear()
        became, was = (self._ready, self._not_ready) if self.is_ready else (self._not_ready, self._ready)
        became.set()
        was.clear()
        self._changed.set()  # whoever waits now; the next change has an event of its own
        self._changed = asyncio.Event()


def _routable(link: WorkerLink) -> WorkerSession | None:
    """Its session, if it can be routed to."""
    return None if link.session is None or link.session.load.draining else link.session


def _limits_of(welcomes: Sequence[link_pb2.Welcome]) -> ModelLimits | None:
    if not welcomes:
        return None
    return ModelLimits(
        **{name: getattr(welcomes[0], name) for name in _AGREED},
        max_context_tokens=min(welcome.max_context_tokens for welcome in welcomes),
    )


def _state(link: WorkerLink) -> str:
    if link.session is None:
        return link.trouble
    return "draining" if link.session.load.draining else "ready"


def _reason(link: WorkerLink, exclude: Collection[int]) -> str:
    session = link.session
    if session is None:
        return link.trouble
    if session.role not in DECODE_ROLES:
        return "only prefills"
    if session.load.draining:
        return "draining"
    return "failed this request" if session.epoch in exclude else "ready"
