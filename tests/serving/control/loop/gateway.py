"""The gateway of the loop: the dispatcher and the gateway's side of handoffs, between clients and workers.

It does what the real gateway's asynchronous code does around the same objects, and nothing else.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.batching.sequence import finish_reason
from moonshard.serving.control.dispatch.attempt import Attempt
from moonshard.serving.control.dispatch.dispatcher import Demand, Dispatcher, DispatchRules, Wait
from moonshard.serving.control.dispatch.retries import Failure, LegFailure, Retries
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff.gateway import (
    Deliver,
    GatewayAction,
    GatewaySide,
    Outcome,
    SendDecode,
    SendPrefill,
)
from moonshard.serving.control.members.fleet import Fleet, Member
from moonshard.serving.control.request import Output, Request
from moonshard.serving.control.routing.policies import policy_of
from moonshard.serving.control.routing.router import Router
from tests.serving.control.loop.clients import Asked, Cancelled, Ended, GivenUp
from tests.serving.control.loop.events import Events
from tests.serving.control.loop.links import Links
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
TICK_S = 0.25


@dataclass(eq=False, kw_only=True, slots=True)
class UnderWay:
    """An attempt and its state. Its id is the handoff's where there is one."""

    id: bytes
    asked: Asked
    attempt: Attempt
    has_first_tokens: bool = False
    has_last: bool = False  # manifest


class Gateway:
    """`prefill_ms` says how long so many tokens take, as workers would report it."""

    def __init__(
        self,
        events: Events,
        draw: random.Random,
        addresses: tuple[str, ...],
        rules: DispatchRules,
        *,
        lease_s: float,
        prefill_ms: Callable[[int], float],
    ):
        self.asked: list[Asked] = []
        self.num_open = 0
        self.router, self.side = Router(), GatewaySide()
        self.dispatcher = Dispatcher(Fleet(addresses), self.router, rules, policy_of("cost"))
        self._events, self._draw = events, draw
        self._lease_s, self._prefill_ms = lease_s, prefill_ms
        self._links = Links(self.dispatcher)
        self._under_way: dict[bytes, UnderWay] = {}
        self._waiting: dict[int, Asked] = {}  # for a worker
        events.after(TICK_S, self._tick)

    # ---- clients

    def ask(self, request: Request, affinity_key: bytes | None) -> Asked:
        asked = Asked(
            number=len(self.asked),
            request=request,
            affinity_key=affinity_key,
            right=tuple(true_output(request, choice) for choice in range(request.n)),
            retries=Retries(max_attempts=MAX_ATTEMPTS),
            tokens=tuple([] for _ in range(request.n)),
        )
        self.asked.append(asked)
        self.num_open += 1
        self._try(asked)
        return asked

    def leave(self, asked: Asked) -> None:
        """The client has left."""
        if asked.ended is not None:
            return
        for under_way in tuple(self._under_way.values()):
            if under_way.asked is asked:
                self._stop(under_way)
        self._end(asked, Cancelled())

    def _end(self, asked: Asked, ended: Ended) -> None:
        asked.end(ended)
        self._waiting.pop(asked.number, None)
        self.num_open -= 1
        self._events.note("ended", asked.number, asked.kind, tuple(map(tuple, asked.tokens)))

    # ---- attempts

    def _try(self, asked: Asked) -> None:
        now_s, request = self._events.now_s, asked.request
        demand = Demand(
            num_prompt=len(request.prompt),
            max_new_tokens=request.n * request.max_tokens,
            names=request.block_names,
            affinity_key=asked.affinity_key,
        )
        match self.dispatcher.begin(demand, asked.retries, now_s, is_resumed=any(asked.tokens)):
            case Attempt() as attempt:
                self._waiting.pop(asked.number, None)
                self._begin(asked, attempt)
            case Wait(end_s):
                self._waiting[asked.number] = asked
                self._events.at(end_s, self._try_again, asked)
            case refusal:
                self._end(asked, refusal)

    def _try_again(self, asked: Asked) -> None:
        """Where it still waits: the workers have changed, or it has waited long enough."""
        if asked.number in self._waiting:
            self._try(asked)

    def _begin(self, asked: Asked, attempt: Attempt) -> None:
        under_way = UnderWay(id=self._draw.randbytes(16), asked=asked, attempt=attempt)
        self._under_way[under_way.id] = under_way
        prefill, decode = attempt.prefill, attempt.decode
        self._events.note("attempt", asked.number, decode.home.worker, None if prefill is None else prefill.home.worker)
        if prefill is None:
            resumed = {c: tuple(tokens) for c, tokens in enumerate(asked.tokens) if c not in asked.finish}
            request, partition = self._request_of(under_way), decode.home.partition
            self._links.send(decode.epoch, Submit(request, partition, resumed if attempt.is_resumed else None))
        else:
            reserve = m.Reserve(handoff=under_way.id, writer_epoch=prefill.epoch, lease_s=self._lease_s)
            self._do(self.side.begin(reserve, decode.epoch, self._events.now_s))
        self._links.sent(decode, self._events.now_s)

    def _request_of(self, under_way: UnderWay) -> Request:
        return replace(under_way.asked.request, id=under_way.id)

    def _close(self, under_way: UnderWay) -> None:
        del self._under_way[under_way.id]
        self.dispatcher.end(under_way.attempt)

    def _stop(self, under_way: UnderWay) -> None:
        """Tells both legs to stop, or the one worker that serves it."""
        self._close(under_way)
        if under_way.attempt.prefill is None:
            self._links.send(under_way.attempt.decode.epoch, End(under_way.id))
        else:
            self._do(self.side.cancel(under_way.id))

    def _failed(self, under_way: UnderWay, failure: Failure, error: Rejected | None = None) -> None:
        asked = under_way.asked
        self._events.note("failed", asked.number, failure.name)
        may_retry = self.dispatcher.failed(under_way.attempt, asked.retries, failure, retry_after_s=1.0)
        self._stop(under_way)
        if may_retry:
            self._try(asked)
        else:
            self._end(asked, error or GivenUp(failure))

    # ---- tokens

    def _take(self, under_way: UnderWay, choice: int, tokens: tuple[int, ...], num_cached_tokens: int) -> None:
        if not under_way.attempt.has_begun:
            num_left = under_way.attempt.num_prompt - num_cached_tokens
            self.dispatcher.first_token(
                under_way.attempt,
                self._events.now_s,
                cached_tokens=num_cached_tokens,
                prefill_ms=self._prefill_ms(num_left),
            )
        asked = under_way.asked
        for token in tokens:
            asked.take(choice, token, finish_reason(asked.request, token, len(asked.tokens[choice]) + 1))

    def _outputs(self, outputs: tuple[Output, ...], epoch: int) -> None:
        for output in outputs:
            under_way = self._under_way.get(output.sequence.request_id)
            if under_way is None:
                continue  # of an attempt that is over
            asked, choice = under_way.asked, output.sequence.choice
            self._take(under_way, choice, output.token_ids, output.num_cached_tokens)
            assert asked.finish.get(choice) == output.finish
            if asked.is_complete:
                self._finish(under_way, epoch)

    def _finish(self, under_way: UnderWay, epoch: int) -> None:
        self._close(under_way)
        if under_way.attempt.prefill is not None:
            self._do(self.side.finished(m.Finished(handoff=under_way.id, epoch=epoch)))
        self._end(under_way.asked, under_way.asked.finish[0])

    # ---- links

    def linked(self, welcome: Welcome, send: Callable[[ToWorker], None]) -> None:
        self._links.begin(welcome, send)
        self._changed()

    def lost(self, address: str, epoch: int) -> None:
        """The link to a worker broke: what the worker held is gone with it."""
        if not self._links.end(epoch):
            return
        self._events.note("lost", address)
        self._do(self.side.peer_gone(epoch))
        for under_way in tuple(self._under_way.values()):
            if under_way.attempt.prefill is None and under_way.attempt.decode.epoch == epoch:
                self._failed(under_way, LegFailure.WORKER_GONE)
        self._changed()

    def _changed(self) -> None:
        for asked in tuple(self._waiting.values()):
            self._try_again(asked)

    def hear(self, epoch: int, message: FromWorker) -> None:
        if not self._links.is_there(epoch):
            return
        match message:
            case Step(outputs):
                self._outputs(outputs, epoch)
            case Report():
                self._links.report(epoch, message)
            case News():
                self._links.news(epoch, message)
            case TurnedDown(request_id, error):
                if (under_way := self._under_way.get(request_id)) is not None:
                    self._failed(under_way, LegFailure.REFUSED, error)
            case Welcome():
                raise AssertionError(message)
            case _:
                self._do(self._heard(message, epoch))
                self._note_prefilled(message)

    def _heard(self, message: m.FromPrefill | m.FromDecode, epoch: int) -> tuple[GatewayAction, ...]:
        match message:
            case m.Target():
                return self.side.target(message)
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
            case m.Finished():
                raise AssertionError("a request's last output says so")

    def _note_prefilled(self, message: m.FromPrefill | m.FromDecode) -> None:
        """The prefill worker has nothing left to do for it once its first tokens and its last chunk are here."""
        if (under_way := self._under_way.get(message.handoff)) is None:
            return
        under_way.has_first_tokens |= isinstance(message, m.FirstTokens)
        under_way.has_last |= isinstance(message, m.Manifest) and message.is_last
        if under_way.has_first_tokens and under_way.has_last:
            if under_way.attempt.is_prefilling:
                self.dispatcher.moved(under_way.attempt, 0.5)
            self.dispatcher.prefill_over(under_way.attempt)

    # ---- what the side asks

    def _do(self, actions: tuple[GatewayAction, ...]) -> None:
        for action in actions:
            match action:
                case SendPrefill(epoch, message) | SendDecode(epoch, message):
                    self._send_leg(epoch, message)
                case Deliver(handoff, tokens):
                    if (under_way := self._under_way.get(handoff)) is not None:
                        assert under_way.attempt.prefill is not None
                        num_known = under_way.attempt.prefill.reservation.num_known_tokens
                        for choice, token in enumerate(tokens):
                            self._take(under_way, choice, (token,), num_known)
                case Outcome(handoff, cause):
                    if (under_way := self._under_way.get(handoff)) is not None:  # else it is the gateway's own doing
                        self._over(under_way, cause)

    def _send_leg(self, epoch: int, message: m.ToPrefill | m.ToDecode) -> None:
        match message:
            case m.Reserve(handoff=handoff) | m.Run(target=m.Target(handoff=handoff)):
                under_way = self._under_way[handoff]
                is_run = isinstance(message, m.Run)
                leg = under_way.attempt.prefill if is_run else under_way.attempt.decode
                assert leg is not None
                self._links.send(epoch, Leg(message, self._request_of(under_way), leg.home.partition))
                if is_run:
                    self._links.sent(leg, self._events.now_s)
            case m.Manifest() | m.Credits() | m.Cancel() | m.Drained():
                self._links.send(epoch, message)
            case m.Start(last=m.Manifest() as last):
                self._links.send(epoch, m.Start(handoff=message.handoff, tokens=message.tokens, last=last))
            case _:
                raise AssertionError(message)

    def _over(self, under_way: UnderWay, cause: m.Cause | None) -> None:
        if cause is not None:
            self._failed(under_way, cause)
        else:
            self._close(under_way)
            self._end(under_way.asked, under_way.asked.finish[0])

    def _tick(self) -> None:
        self._do(self.side.expire(self._events.now_s))
        self._events.after(TICK_S, self._tick)

    # ---- at the end

    def check_as_begun(self, homes: Mapping[str, Member]) -> None:
        assert self.side.num_handoffs == 0
        assert not self._under_way
        assert not self._waiting
        for member in homes.values():
            for home in member.homes:
                assert self.router.in_flight_tokens(home) == 0, f"tokens are held on {home}"
