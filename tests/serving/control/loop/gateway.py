"""The gateway of the loop: router, TTFT model and bound, and the gateway's side of handoffs, with clients before it.

It does what the real one does around the same objects: an attempt at a request holds tokens on the routes it was sent
along, and is gone on with elsewhere when it fails. What the client is told is checked as it is told.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from moonshard.serving.control.batching.sequence import finish_reason
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff.gateway import (
    Deliver,
    GatewayAction,
    GatewaySide,
    Outcome,
    SendDecode,
    SendPrefill,
)
from moonshard.serving.control.request import FinishReason, Output, Request
from moonshard.serving.control.routing.policies import Policy, cost
from moonshard.serving.control.routing.prefix_index import PrefixChange, PrefixSubscriber
from moonshard.serving.control.routing.router import Ask, Home, Reservation, Router
from moonshard.serving.control.routing.ttft import TtftModel
from moonshard.serving.control.routing.ttft_bound import Refusals, ttft_limit_s
from tests.serving.control.loop.events import Events
from tests.serving.control.loop.messages import (
    End,
    FromWorker,
    Leg,
    News,
    Report,
    Step,
    Submit,
    ToWorker,
    TurnedDown,
    Welcome,
)
from tests.serving.fake_device import true_output

MAX_ATTEMPTS = 6
MAX_PREFILL_FAILURES = 2
FAILOVER_WAIT_S = 2.0
PATIENCE_S = 0.05
TICK_S = 0.25
BLAMES_DECODE_ALONE = (m.Cause.OVERLOADED, m.Cause.DECODE_GONE)


@dataclass(frozen=True, slots=True)
class Refused:
    """Typed: what a client is told instead of (more) tokens."""

    kind: str  # ttft | queue | no_room | no_worker | attempts
    retry_after_s: float = 1.0


class Cancelled:
    """The client left."""


type Ended = FinishReason | Refused | type[Cancelled]


@dataclass(eq=False, kw_only=True, slots=True)
class Route:
    worker: str
    epoch: int
    reservation: Reservation

    @property
    def partition(self) -> int:
        return self.reservation.home.partition


@dataclass(eq=False, kw_only=True, slots=True)
class Attempt:
    id: bytes
    begun_s: float
    decode: Route
    prefill: Route | None
    has_output: bool = False

    @property
    def prompt_route(self) -> Route:
        return self.prefill or self.decode


@dataclass(eq=False, kw_only=True, slots=True)
class Asked:
    """A request as a client sees it, and what was tried for it."""

    number: int
    request: Request
    affinity_key: bytes | None
    right: tuple[tuple[list[int], FinishReason], ...]  # what each choice must come to
    tokens: tuple[list[int], ...]
    finish: dict[int, FinishReason] = field(default_factory=dict)
    attempt: Attempt | None = None
    num_attempts: int = 0
    num_prefill_failures: int = 0
    failed_epochs: set[int] = field(default_factory=set)
    was_overloaded: bool = False  # its last attempt
    wait_end_s: float = 0.0
    ended: Ended | None = None

    def check_so_far(self) -> None:
        for (right, _), tokens in zip(self.right, self.tokens, strict=True):
            assert tokens == right[: len(tokens)], "a token that is another's"

    def check_end(self) -> None:
        """All of its tokens, or a typed end."""
        self.check_so_far()
        if isinstance(self.ended, FinishReason):
            assert [(self.tokens[c], self.finish[c]) for c in range(self.request.n)] == list(self.right)
        else:
            assert isinstance(self.ended, Refused) or self.ended is Cancelled


@dataclass(eq=False, kw_only=True, slots=True)
class Session:
    """A worker's process, as long as the gateway has a link to it."""

    name: str
    role: str
    epoch: int
    homes: tuple[Home, ...]
    send: Callable[[ToWorker], None]
    subscriber: PrefixSubscriber
    num_sent: int = 0
    unseen: deque[tuple[int, Reservation]] = field(default_factory=deque)


class Gateway:
    def __init__(
        self,
        events: Events,
        draw: random.Random,
        *,
        block_size: int,
        lease_s: float,
        roles: Mapping[str, str],
        num_partitions: int,
        policy: Policy = cost,
    ):
        self.events, self.draw = events, draw
        self.block_size, self.lease_s, self.policy = block_size, lease_s, policy
        self.router, self.side = Router(), GatewaySide()
        self.ttft, self.refusals = TtftModel(), Refusals()
        self.asked: list[Asked] = []
        self.num_open = 0
        self._roles = roles
        self._homes = {name: tuple(Home(name, partition) for partition in range(num_partitions)) for name in roles}
        self._sessions: dict[str, Session] = {}
        self._of_attempt: dict[bytes, Asked] = {}
        events.after(TICK_S, self._tick)

    # ---- clients

    def ask(self, request: Request, affinity_key: bytes | None) -> Asked:
        asked = Asked(
            number=len(self.asked),
            request=request,
            affinity_key=affinity_key,
            right=tuple(true_output(request, choice) for choice in range(request.n)),
            tokens=tuple([] for _ in range(request.n)),
        )
        self.asked.append(asked)
        self.num_open += 1
        self._try(asked)
        return asked

    def leave(self, asked: Asked) -> None:
        """Its client is gone."""
        if asked.ended is None:
            self._drop_attempt(asked)
            self._end(asked, Cancelled)

    def _end(self, asked: Asked, ended: Ended) -> None:
        assert asked.ended is None, "ended twice"
        assert asked.attempt is None
        asked.ended = ended
        self.num_open -= 1
        said = ended.kind if isinstance(ended, Refused) else getattr(ended, "value", "cancelled")
        self.events.note("ended", asked.number, said, tuple(map(tuple, asked.tokens)))

    # ---- attempts

    def _try(self, asked: Asked) -> None:
        decode = self._route(asked, "decode", asked.failed_epochs)
        if decode is None and asked.was_overloaded:
            self._end(asked, Refused("no_room"))
            return
        decode = decode or self._route(asked, "decode", ())
        if decode is None:
            self._wait_for_worker(asked)
            return
        resumed = self._resumed(asked)
        prefill = None
        if resumed is None and asked.num_prefill_failures < MAX_PREFILL_FAILURES:
            prefill = self._route(asked, "prefill", asked.failed_epochs) or self._route(asked, "prefill", ())
        attempt = Attempt(id=self.draw.randbytes(16), begun_s=self.events.now_s, decode=decode, prefill=prefill)
        if not asked.num_attempts and (refused := self._refusal(asked, attempt.prompt_route)) is not None:
            self._release(attempt)
            self._end(asked, refused)
            return
        asked.attempt = attempt
        asked.num_attempts += 1
        self._of_attempt[attempt.id] = asked
        self.events.note("attempt", asked.number, decode.worker, None if prefill is None else prefill.worker)
        if prefill is None:
            self._send(decode.epoch, Submit(self._request_of(asked, attempt), decode.partition, resumed))
        else:
            reserve = m.Reserve(handoff=attempt.id, writer_epoch=prefill.epoch, lease_s=self.lease_s)
            self._do(self.side.begin(reserve, decode.epoch, self.events.now_s))
        self._sent(decode)

    def _wait_for_worker(self, asked: Asked) -> None:
        """One that lost its own waits a while for another; a new one does not."""
        now_s = self.events.now_s
        if not asked.num_attempts or now_s >= (asked.wait_end_s or now_s + 1):
            self._end(asked, Refused("no_worker"))
            return
        asked.wait_end_s = asked.wait_end_s or now_s + FAILOVER_WAIT_S
        self.events.after(PATIENCE_S, self._try_again, asked)

    def _try_again(self, asked: Asked) -> None:
        if asked.ended is None and asked.attempt is None:
            self._try(asked)

    def _resumed(self, asked: Asked) -> dict[int, tuple[int, ...]] | None:
        if not any(asked.tokens):
            return None
        return {c: tuple(tokens) for c, tokens in enumerate(asked.tokens) if c not in asked.finish}

    def _request_of(self, asked: Asked, attempt: Attempt) -> Request:
        return replace(asked.request, id=attempt.id)

    def _route(self, asked: Asked, role: str, exclude: Iterable[int]) -> Route | None:
        request, excluded = asked.request, set(exclude)
        sessions = [s for s in self._sessions.values() if s.role == role and s.epoch not in excluded]
        homes = tuple(home for session in sessions for home in session.homes)
        num_prompt = len(request.prompt)
        ask = Ask(
            num_tokens=num_prompt if role == "prefill" else num_prompt + request.n * request.max_tokens,
            num_prompt=num_prompt,
            is_prefill=role == "prefill",
            names=request.block_names,
            block_size=self.block_size,
            affinity_key=None if asked.affinity_key is None else asked.affinity_key + role[:1].encode(),
        )
        reservation = self.router.reserve(homes, ask, policy=self.policy, now_s=self.events.now_s)
        if reservation is None:
            return None
        worker = reservation.home.worker
        return Route(worker=worker, epoch=self._sessions[worker].epoch, reservation=reservation)

    def _refusal(self, asked: Asked, route: Route) -> Refused | None:
        """Where its first token would come later than was promised."""
        kept, num_prompt = route.reservation, len(asked.request.prompt)
        own_tokens, queued_tokens = num_prompt - kept.num_known_tokens, kept.num_queued_tokens
        predicted_s = self.ttft.predict_s(route.worker, own_tokens=own_tokens, queued_tokens=queued_tokens)
        alone_s = self.ttft.predict_s(route.worker, own_tokens=own_tokens, queued_tokens=0)
        if predicted_s is None or alone_s is None or not queued_tokens:
            return None
        excess_s = predicted_s - ttft_limit_s(0.25, alone_s)
        if excess_s <= 0:
            return None
        retry_after_s = self.refusals.retry_after_s(self.events.now_s, excess_s=excess_s, alone_s=alone_s)
        return Refused("ttft", retry_after_s)

    def _sent(self, route: Route) -> None:
        """It is on its way there: from now on that is where its session was last."""
        self.router.sent(route.reservation, self.events.now_s)
        if (session := self._session_of(route.epoch)) is not None:
            session.unseen.append((session.num_sent, route.reservation))

    def _release(self, attempt: Attempt) -> None:
        for route in (attempt.decode, attempt.prefill):
            if route is not None:
                self.router.release(route.reservation)

    def _close(self, asked: Asked) -> Attempt:
        attempt, asked.attempt = asked.attempt, None
        assert attempt is not None
        del self._of_attempt[attempt.id]
        self._release(attempt)
        return attempt

    def _drop_attempt(self, asked: Asked) -> None:
        """Both legs are told, or the one worker that serves it."""
        if (attempt := asked.attempt) is None:
            return
        self._close(asked)
        if attempt.prefill is None:
            self._send(attempt.decode.epoch, End(attempt.id))
        else:
            self._do(self.side.cancel(attempt.id))

    def _failed(self, asked: Asked, cause: m.Cause | None) -> None:
        """None: the one worker that served it is gone."""
        attempt = self._close(asked)
        self.events.note("failed", asked.number, "worker gone" if cause is None else cause.name)
        asked.was_overloaded = cause is m.Cause.OVERLOADED
        if cause is not m.Cause.PREFILL_GONE:
            asked.failed_epochs.add(attempt.decode.epoch)
        if cause is not None and cause not in BLAMES_DECODE_ALONE:
            asked.num_prefill_failures += 1
            if attempt.prefill is not None:
                asked.failed_epochs.add(attempt.prefill.epoch)
        if asked.num_attempts >= MAX_ATTEMPTS:
            self._end(asked, Refused("attempts"))
        else:
            asked.wait_end_s = 0.0
            self._try(asked)

    # ---- tokens

    def _take(self, asked: Asked, choice: int, tokens: tuple[int, ...]) -> None:
        assert choice not in asked.finish, "a token after the last one"
        asked.tokens[choice].extend(tokens)
        asked.check_so_far()
        reason = finish_reason(asked.request, tokens[-1], len(asked.tokens[choice]))
        if reason is not None:
            asked.finish[choice] = reason
        attempt = asked.attempt
        if attempt is not None and not attempt.has_output:
            attempt.has_output = True
            self._learn(asked, attempt)

    def _learn(self, asked: Asked, attempt: Attempt) -> None:
        kept = attempt.prompt_route.reservation
        self.ttft.observe(
            attempt.prompt_route.worker,
            own_tokens=len(asked.request.prompt) - kept.num_known_tokens,
            queued_tokens=kept.num_queued_tokens,
            ttft_s=self.events.now_s - attempt.begun_s,
        )

    def _outputs(self, session: Session, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            asked = self._of_attempt.get(output.sequence.request_id)
            if asked is None:
                continue  # of an attempt that is over
            self._take(asked, output.sequence.choice, output.token_ids)
            assert asked.finish.get(output.sequence.choice) == output.finish
            if len(asked.finish) == asked.request.n:
                self._finish(asked, session.epoch)

    def _finish(self, asked: Asked, epoch: int) -> None:
        attempt = self._close(asked)
        if attempt.prefill is not None:
            self._do(self.side.finished(m.Finished(handoff=attempt.id, epoch=epoch)))
        self._end(asked, asked.finish[0])

    # ---- links

    def linked(self, name: str, welcome: Welcome, send: Callable[[ToWorker], None]) -> None:
        homes = self._homes[name]
        numbers = tuple(self.router.home_number(home) for home in homes)
        subscriber = PrefixSubscriber(self.router.index, numbers)
        known = ((number, block) for number, names in zip(numbers, welcome.known, strict=True) for block in names)
        subscriber.snapshot(welcome.epoch, welcome.next_number, known)
        self._sessions[name] = Session(
            name=name, role=self._roles[name], epoch=welcome.epoch, homes=homes, send=send, subscriber=subscriber
        )

    def lost(self, name: str) -> None:
        """The link to a worker broke: what it held is gone with it."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        session.subscriber.gone()
        self.ttft.forget(name)
        for home in session.homes:
            self.router.silent(home)
        self.events.note("lost", name)
        self._do(self.side.peer_gone(session.epoch))
        for asked in tuple(self._of_attempt.values()):
            attempt = asked.attempt
            if attempt is not None and attempt.prefill is None and attempt.decode.epoch == session.epoch:
                self._failed(asked, None)

    def hear(self, name: str, epoch: int, message: FromWorker) -> None:
        session = self._sessions.get(name)
        if session is None or session.epoch != epoch:
            return  # of a link that is broken
        match message:
            case Step(outputs):
                self._outputs(session, outputs)
            case Report():
                self._report(session, message)
            case News(events):
                changes = [PrefixChange(self._number(session, e.partition), e.name, e.is_known) for e in events]
                assert session.subscriber.events(epoch, events[0].number, changes)
            case TurnedDown(request_id):
                self._turned_down(request_id)
            case _:
                self._do(self._heard(message, session.epoch))

    def _number(self, session: Session, partition: int) -> int:
        return self.router.home_number(session.homes[partition])

    def _report(self, session: Session, report: Report) -> None:
        while session.unseen and session.unseen[0][0] <= report.num_seen:
            self.router.seen(session.unseen.popleft()[1])
        for home, tokens in zip(session.homes, report.tokens, strict=True):
            self.router.report(home, tokens)

    def _turned_down(self, request_id: bytes) -> None:
        """What a worker says of the request itself is final."""
        if (asked := self._of_attempt.get(request_id)) is not None:
            self._drop_attempt(asked)
            self._end(asked, Refused("queue"))

    def _heard(self, message: FromWorker, epoch: int) -> tuple[GatewayAction, ...]:
        match message:
            case m.Target():
                return self.side.target(message)
            case m.Overloaded(handoff=handoff):
                turned_down = m.Failed(handoff=handoff, epoch=epoch, cause=m.Cause.OVERLOADED)
                return self.side.overloaded(message) or self.side.failed(turned_down)
            case m.Credits():
                return self.side.credits(message)
            case m.Manifest():
                return self.side.chunk(message)
            case m.FirstTokens():
                return self.side.first_tokens(message)
            case m.Drained():
                return self.side.drained(message)
            case m.Failed():
                return self.side.failed(message)
            case _:
                raise AssertionError(message)

    def _session_of(self, epoch: int) -> Session | None:
        return next((session for session in self._sessions.values() if session.epoch == epoch), None)

    def _send(self, epoch: int, message: ToWorker) -> None:
        """Dropped where that process is gone: what it held is gone with it."""
        if (session := self._session_of(epoch)) is not None:
            session.num_sent += isinstance(message, Submit | Leg)
            session.send(message)

    # ---- what the side asks

    def _do(self, actions: tuple[GatewayAction, ...]) -> None:
        for action in actions:
            match action:
                case SendPrefill(epoch, message) | SendDecode(epoch, message):
                    self._send_leg(epoch, message)
                case Deliver(handoff, tokens):
                    if (asked := self._of_attempt.get(handoff)) is not None:
                        for choice, token in enumerate(tokens):
                            self._take(asked, choice, (token,))
                case Outcome(handoff, cause):
                    self._over(handoff, cause)

    def _send_leg(self, epoch: int, message: m.ToPrefill | m.ToDecode) -> None:
        match message:
            case m.Reserve(handoff=handoff) | m.Run(target=m.Target(handoff=handoff)):
                asked = self._of_attempt[handoff]
                attempt = asked.attempt
                assert attempt is not None
                assert attempt.prefill is not None
                route = attempt.decode if isinstance(message, m.Reserve) else attempt.prefill
                self._send(epoch, Leg(message, self._request_of(asked, attempt), route.partition))
                if isinstance(message, m.Run):
                    self._sent(route)
            case _:
                self._send(epoch, message)

    def _over(self, handoff: bytes, cause: m.Cause | None) -> None:
        asked = self._of_attempt.get(handoff)
        if asked is None:
            return  # the gateway's own doing
        if cause is not None:
            self._failed(asked, cause)
        else:
            self._close(asked)
            self._end(asked, asked.finish[0])

    def _tick(self) -> None:
        self._do(self.side.expire(self.events.now_s))
        self.events.after(TICK_S, self._tick)

    # ---- at the end

    def check_as_begun(self) -> None:
        assert self.side.num_handoffs == 0
        assert not self._of_attempt
        for homes in self._homes.values():
            for home in homes:
                assert self.router.in_flight_tokens(home) == 0, f"tokens are held on {home}"
