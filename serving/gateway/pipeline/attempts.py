"""The attempts at one request: begun on some workers and, when these are lost, gone on with on others.

What the client is sent does not show it. A request without a token is begun anew; one that has tokens goes on from them
on a worker that decodes, which prefills prompt and tokens itself. The seed travels with the request and noise is keyed
by position, so that every token is the one it would have been. What may be tried again is `failures`'.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from moonshard.kv.prefix import split_names
from moonshard.rpc import link_pb2
from moonshard.rpc.link import REQUEST_ID_BYTES
from moonshard.rpc.status import RequestError, Unavailable
from moonshard.serving.config.keys import RoutingConfig
from moonshard.serving.control.routing.router import Affinity, Ask
from moonshard.serving.control.routing.ttft_bound import Refusals, ttft_limit_s
from moonshard.serving.gateway.failures import Failures, final_error
from moonshard.serving.gateway.pipeline.choice import ChoiceStream
from moonshard.serving.gateway.pipeline.handoffs import Handoff, Handoffs
from moonshard.serving.gateway.pipeline.prefill_place import PrefillPlace
from moonshard.serving.gateway.records.events import (
    Assignment,
    AttemptEnded,
    AttemptFailed,
    AttemptSent,
    Leg,
    RequestRetried,
)
from moonshard.serving.gateway.records.log import RequestLog
from moonshard.serving.gateway.records.spans import mark_attempt
from moonshard.serving.gateway.refusals import LimitReached
from moonshard.serving.gateway.workers.inbox import Arrival, Inbox
from moonshard.serving.gateway.workers.pool import LinkPool, Route

MAX_PREFILL_FAILURES = 2  # then the decode worker prefills


@dataclass(frozen=True, slots=True)
class Sent:
    """An attempt is on its way."""

    worker: str  # the address of the one that prefills it
    affinity: Affinity | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    """What one attempt was sent as, and where. `choices` are those that had not ended before it."""

    run: link_pb2.Run
    choices: tuple[ChoiceStream, ...]
    inbox: Inbox
    route: Route
    prefill_leg: ExitStack  # what is held until its prompt is computed
    prefill: Route | None = None
    handoff: Handoff | None = None
    begun_s: float = field(default_factory=time.perf_counter)

    @property
    def is_over(self) -> bool:
        return all(choice.is_ended for choice in self.choices)

    @property
    def is_worker_done(self) -> bool:
        return all(choice.is_worker_done for choice in self.choices)

    @property
    def prefill_epoch(self) -> int | None:
        return None if self.prefill is None else self.prefill.session.epoch

    @property
    def prompt_route(self) -> Route:
        """Where its prompt is computed."""
        return self.prefill or self.route

    def sent(self) -> AttemptSent:
        prefill = None if self.prefill is None else _leg_of(self.prefill)
        is_whole = self.route.session.role == "both"
        return AttemptSent(
            worker_index=self.route.worker_index,
            assignment=Assignment(attempt_id=self.run.request_id, prefill=prefill, decode=_leg_of(self.route)),
            is_prefill_at_decode=prefill is None and not is_whole and not self.run.resumed,
        )

    async def arrivals(self) -> list[Arrival]:
        """All that has come, at least one. Raises the error that ends the attempt."""
        return await self.inbox.take()


class Attempts:
    """How a gateway gets requests done on its pool. Requests are not tried again once `may_retry` says no."""

    def __init__(
        self,
        pool: LinkPool,
        handoffs: Handoffs,
        routing: RoutingConfig,
        *,
        may_retry: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._handoffs = handoffs
        self._routing = routing
        self._place = PrefillPlace(routing)
        self._may_retry = may_retry
        self._refusals = Refusals()

    async def events(
        self,
        run: link_pb2.Run,
        choices: Sequence[ChoiceStream],
        log: RequestLog,
        affinity_key: bytes | None = None,
    ) -> AsyncGenerator[Sent | list[Arrival]]:
        """What is sent and what workers send back, until every choice has ended. Close it (`aclosing`) to cancel.

        Arrivals are given together where they came faster than they were asked for. The caller feeds each to `choices`
        before it asks for more. Raises RequestError where the request can go on nowhere.
        """
        failures = Failures(max_attempts=self._routing.max_attempts)
        while True:
            with ExitStack() as held:
                route = await self._decode_route(run, affinity_key, failures, held)
                attempt = self._begin(run, choices, route, affinity_key, failures, held, log)
                log.append(attempt.sent())
                held.callback(self._end, attempt, log)
                is_first = not attempt.run.resumed
                try:
                    where = attempt.prompt_route
                    yield Sent(where.session.address, where.reservation.affinity)
                    while not attempt.is_over:
                        arrivals = await attempt.arrivals()
                        if is_first:
                            self._prefilled(attempt, arrivals[0])
                            is_first = False
                        yield arrivals
                    return
                except RequestError as error:
                    log.append(AttemptFailed.of(error))
                    if is_first:
                        self._nothing_came(attempt)
                    log.append(RequestRetried(self._failed(attempt, error, failures)))

    async def _decode_route(
        self, run: link_pb2.Run, affinity_key: bytes | None, failures: Failures, held: ExitStack
    ) -> Route:
        """Where there is no worker, a request that lost its own waits a while for one; a new one does not."""
        ask = self._ask(run, affinity_key, is_prefill=False)
        clock = asyncio.get_running_loop()
        end_s = clock.time() + self._routing.failover_wait_s
        while True:
            try:
                return self._reserve_decode(ask, failures, held)
            except Unavailable:
                if not failures.num_attempts or clock.time() >= end_s:
                    raise
            await self._pool.wait_changed(max(0.0, end_s - clock.time()))

    def _ask(self, run: link_pb2.Run, affinity_key: bytes | None, *, is_prefill: bool) -> Ask:
        """What one leg asks of the router. Each leg of an affinity key has a pin of its own."""
        num_prompt, names = len(run.prompt_tokens), split_names(run.block_names)
        return Ask(
            num_tokens=num_prompt if is_prefill else num_prompt + run.n * run.max_tokens,
            num_prompt=num_prompt,
            is_prefill=is_prefill,
            names=names,
            block_size=self._pool.block_size,
            affinity_key=None if affinity_key is None else affinity_key + (b"p" if is_prefill else b"d"),
        )

    def _reserve_decode(self, ask: Ask, failures: Failures, held: ExitStack) -> Route:
        """A worker that failed this request is better than none, but for one that has no room."""
        try:
            return held.enter_context(self._pool.reserve_decode(ask, exclude=failures.epochs))
        except Unavailable:
            if failures.overloaded is not None:
                raise final_error(failures.overloaded) from None
            if not failures.epochs:
                raise
        return held.enter_context(self._pool.reserve_decode(ask))

    def _begin(
        self,
        run: link_pb2.Run,
        choices: Sequence[ChoiceStream],
        route: Route,
        affinity_key: bytes | None,
        failures: Failures,
        held: ExitStack,
        log: RequestLog,
    ) -> _Attempt:
        rest, going_on = rest_of(run, choices), tuple(choice for choice in choices if not choice.is_ended)
        prefill_leg = held.enter_context(ExitStack())
        prefill = None if rest.resumed else self._prefill_route(rest, route, affinity_key, failures, prefill_leg)
        rest.partition = route.partition
        if not failures.num_attempts:
            self._check_ttft(prefill or route, len(run.prompt_tokens))
        if prefill is None:
            inbox = route.session.run(rest)
            self._pool.sent(route)
            return _Attempt(run=rest, choices=going_on, inbox=inbox, route=route, prefill_leg=prefill_leg)
        handoff = self._handoffs.begin(rest, log, prefill=prefill, decode=route.session, prefill_leg=prefill_leg)
        self._pool.sent(route)
        return _Attempt(
            run=rest,
            choices=going_on,
            inbox=handoff.inbox,
            route=route,
            prefill_leg=prefill_leg,
            prefill=prefill,
            handoff=handoff,
        )

    def _check_ttft(self, route: Route, num_prompt: int) -> None:
        """Raises Overloaded where the first token would come later than was promised.

        Never where nothing is queued: what it takes then is the least it can take, and how it is learned.
        """
        predicted_s = self._pool.predict_ttft_s(route, num_prompt)
        alone_s = self._pool.predict_ttft_s(route, num_prompt, is_alone=True)
        if predicted_s is None or alone_s is None or not route.reservation.num_queued_tokens:
            return
        limit_s = ttft_limit_s(self._routing.ttft_slo_s, alone_s)
        if predicted_s <= limit_s:
            return
        raise LimitReached(
            "ttft_slo",
            f"the first token would take {predicted_s:.1f} s, more than {limit_s:.1f} s (routing.ttft_slo_s)",
            retry_after_s=self._refusals.retry_after_s(
                time.monotonic(), excess_s=predicted_s - limit_s, alone_s=alone_s
            ),
            predicted_ttft_s=predicted_s,
        )

    def _prefill_route(
        self, run: link_pb2.Run, decode: Route, affinity_key: bytes | None, failures: Failures, leg: ExitStack
    ) -> Route | None:
        """None where the worker that decodes should prefill too: by the rule for that, or since there is no other."""
        if decode.session.role == "both":
            return None
        num_prompt = len(run.prompt_tokens)
        if not self._place.is_here_anyway(num_prompt, decode) and failures.num_prefill < MAX_PREFILL_FAILURES:
            route = self._reserve_prefill(self._ask(run, affinity_key, is_prefill=True), failures, leg)
            if route is not None and not self._place.is_here(num_prompt, decode, route):
                return route
            leg.close()
        leg.enter_context(self._place.prefilling_here(num_prompt, decode))
        return None

    def _reserve_prefill(self, ask: Ask, failures: Failures, leg: ExitStack) -> Route | None:
        """A worker that failed this request is better than none."""
        route = leg.enter_context(self._pool.reserve_prefill(ask, exclude=failures.epochs))
        return route or leg.enter_context(self._pool.reserve_prefill(ask))

    def _prefilled(self, attempt: _Attempt, first: Arrival) -> None:
        """Its first token came: whoever predicts learns from it."""
        if attempt.prefill is None:
            attempt.prefill_leg.close()
        self._pool.first_token(
            attempt.prompt_route, len(attempt.run.prompt_tokens), time.perf_counter() - attempt.begun_s
        )
        if first.output.HasField("phases"):
            self._place.prefilled(len(attempt.run.prompt_tokens), first.output, is_here=attempt.prefill is None)

    def _nothing_came(self, attempt: _Attempt) -> None:
        for leg in (attempt.route, attempt.prefill):
            if leg is not None:
                self._pool.nothing_came(leg)

    def _failed(self, attempt: _Attempt, error: RequestError, failures: Failures) -> str:
        """Its cause in a word. Raises where the request ends with it."""
        if not self._may_retry():
            raise final_error(error)
        return failures.add(error, decode_epoch=attempt.route.session.epoch, prefill_epoch=attempt.prefill_epoch)

    def _end(self, attempt: _Attempt, log: RequestLog) -> None:
        log.append(AttemptEnded())
        session, handoff = attempt.route.session, attempt.handoff
        if handoff is None:
            session.close(attempt.run.request_id, cancel=not attempt.is_worker_done)
            return
        if handoff.transfer is not None:
            self._place.moved(len(attempt.run.prompt_tokens), attempt.route, handoff.transfer)
        self._handoffs.end(handoff, decode=session, is_finished=attempt.is_worker_done)


def _leg_of(route: Route) -> Leg:
    return Leg(route.session.address, route.session.welcome.epoch, route.partition)


def rest_of(run: link_pb2.Run, choices: Sequence[ChoiceStream]) -> link_pb2.Run:
    """What is left to do of a request, under an id of its own: what still comes for the last attempt is nobody's."""
    rest = link_pb2.Run()
    rest.CopyFrom(run)
    rest.request_id = secrets.token_bytes(REQUEST_ID_BYTES)
    mark_attempt(rest)
    if any(choice.token_ids for choice in choices):
        going_on = (choice for choice in choices if not choice.is_ended)
        rest.resumed.extend(link_pb2.Resumed(choice=choice.index, token_ids=choice.token_ids) for choice in going_on)
    return rest
