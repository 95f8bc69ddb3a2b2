"""The attempts at one request: begun on some workers and, when these are lost, gone on with on others.

What the client is sent does not show it. A request without a token is begun anew; one that has tokens goes on from them
on a worker that decodes, which prefills prompt and tokens itself. The seed travels with the request and noise is keyed
by position, so that every token is the one it would have been. The dispatcher decides where an attempt runs and whether
there is another (`control.dispatch`); here it is sent, listened to and ended.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from moonshard.kv.prefix import split_names
from moonshard.rpc import link_pb2
from moonshard.rpc.link import REQUEST_ID_BYTES
from moonshard.rpc.status import RequestError
from moonshard.serving.control.dispatch.attempt import Attempt
from moonshard.serving.control.dispatch.dispatcher import Demand, NoRoom, NoWorker, Refusal, Wait
from moonshard.serving.control.dispatch.retries import Retries
from moonshard.serving.control.handoff.messages import Cause
from moonshard.serving.control.routing.router import Affinity, Home
from moonshard.serving.control.ttft.bound import TooLate
from moonshard.serving.gateway.failures import HandoffFailed, failure_of, final_error
from moonshard.serving.gateway.pipeline.choice import ChoiceStream
from moonshard.serving.gateway.pipeline.handoffs import Handoff, Handoffs
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
from moonshard.serving.gateway.workers.pool import LinkPool
from moonshard.serving.gateway.workers.session import WorkerSession


@dataclass(frozen=True, slots=True)
class Sent:
    """Told once an attempt was sent."""

    worker: str  # the address of the one that prefills it
    affinity: Affinity | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnderWay:
    """An attempt that was sent: its messages, and where they went. `choices` are those that had not ended before it."""

    attempt: Attempt
    run: link_pb2.Run
    choices: tuple[ChoiceStream, ...]
    session: WorkerSession  # with the worker that decodes it
    inbox: Inbox
    handoff: Handoff | None

    @property
    def is_over(self) -> bool:
        return all(choice.is_ended for choice in self.choices)

    @property
    def is_worker_done(self) -> bool:
        return all(choice.is_worker_done for choice in self.choices)

    async def arrivals(self) -> list[Arrival]:
        """All that has arrived and was not taken, at least one. Raises the error that ends the attempt."""
        return await self.inbox.take()


class Attempts:
    """How a gateway gets requests done on its pool. Requests are not tried again once `may_retry` says no."""

    def __init__(
        self,
        pool: LinkPool,
        handoffs: Handoffs,
        *,
        max_attempts: int,
        may_retry: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._knowledge = pool.knowledge
        self._dispatcher = pool.knowledge.dispatcher
        self._handoffs = handoffs
        self._max_attempts = max_attempts
        self._may_retry = may_retry

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
        demand, retries = _demand(run, affinity_key), Retries(max_attempts=self._max_attempts)
        while True:
            with ExitStack() as held:
                attempt = await self._dispatch(demand, retries, choices)
                held.callback(self._dispatcher.end, attempt)
                under_way = self._send(attempt, rest_of(run, choices), choices, log)
                log.append(self._sent(under_way))
                held.callback(self._end, under_way, log)
                try:
                    yield Sent(attempt.prompt.home.worker, attempt.prompt.reservation.affinity)
                    while not under_way.is_over:
                        arrivals = await under_way.arrivals()
                        if not attempt.has_begun:
                            self._begun(attempt, arrivals[0])
                        yield arrivals
                    return
                except RequestError as error:
                    log.append(AttemptFailed.of(error))
                    log.append(RequestRetried(self._failed(attempt, retries, error)))

    async def _dispatch(self, demand: Demand, retries: Retries, choices: Sequence[ChoiceStream]) -> Attempt:
        """Raises RequestError where the request is refused."""
        is_resumed = any(choice.token_ids for choice in choices)
        while True:
            now_s = time.monotonic()
            match self._dispatcher.begin(demand, retries, now_s, is_resumed=is_resumed):
                case Attempt() as attempt:
                    return attempt
                case Wait(end_s):
                    await self._pool.wait_changed(end_s - now_s)
                case refusal:
                    raise self._refused(refusal)

    def _refused(self, refusal: Refusal) -> RequestError:
        match refusal:
            case NoWorker():
                return self._pool.unavailable()
            case NoRoom(retry_after_s):
                return final_error(HandoffFailed(Cause.OVERLOADED, retry_after_s=retry_after_s))
            case TooLate(predicted_s=predicted_s, limit_s=limit_s, retry_after_s=retry_after_s):
                return LimitReached(
                    "ttft_slo",
                    f"the first token would take {predicted_s:.1f} s, more than {limit_s:.1f} s (routing.ttft_slo_s)",
                    retry_after_s=retry_after_s,
                    predicted_ttft_s=predicted_s,
                )

    def _send(
        self, attempt: Attempt, rest: link_pb2.Run, choices: Sequence[ChoiceStream], log: RequestLog
    ) -> _UnderWay:
        rest.partition = attempt.decode.home.partition
        session, handoff = self._knowledge.session_at(attempt.decode.home.worker), None
        if attempt.prefill is None:
            inbox = session.run(rest)
        else:
            handoff = self._handoffs.begin(rest, log, attempt, attempt.prefill, decode=session)
            inbox = handoff.inbox
        self._knowledge.sent(session, attempt.decode)
        going_on = tuple(choice for choice in choices if not choice.is_ended)
        return _UnderWay(attempt=attempt, run=rest, choices=going_on, session=session, inbox=inbox, handoff=handoff)

    def _begun(self, attempt: Attempt, first: Arrival) -> None:
        """The attempt's first token has come."""
        phases = first.output.phases if first.output.HasField("phases") else None
        self._dispatcher.first_token(
            attempt,
            time.monotonic(),
            cached_tokens=first.output.cached_tokens,
            prefill_ms=None if phases is None else phases.prefill_ms,
        )

    def _failed(self, attempt: Attempt, retries: Retries, error: RequestError) -> str:
        """The cause of a failed attempt, in a word. Raises the request's error where there is no further attempt."""
        failure = failure_of(error)
        is_over = not self._dispatcher.failed(attempt, retries, failure, retry_after_s=error.retry_after_s)
        if is_over or not self._may_retry():
            raise final_error(error)
        return failure.name.lower()

    def _end(self, under_way: _UnderWay, log: RequestLog) -> None:
        log.append(AttemptEnded())
        session, handoff = under_way.session, under_way.handoff
        if handoff is None:
            session.close(under_way.run.request_id, cancel=not under_way.is_worker_done)
            return
        if handoff.transfer is not None:
            self._dispatcher.moved(under_way.attempt, handoff.transfer.exposed_ms)
        self._handoffs.end(handoff, decode=session, is_finished=under_way.is_worker_done)

    def _sent(self, under_way: _UnderWay) -> AttemptSent:
        """The event that is appended to the log."""
        attempt = under_way.attempt
        assignment = Assignment(
            attempt_id=under_way.run.request_id,
            prefill=None if attempt.prefill is None else self._leg(attempt.prefill.home),
            decode=self._leg(attempt.decode.home),
        )
        return AttemptSent(
            worker_index=self._pool.index_of(attempt.decode.home.worker),
            assignment=assignment,
            is_prefill_at_decode=attempt.is_local_prefill,
            has_tiers=self._knowledge.session_at(attempt.prompt.home.worker).load.HasField("kv_store"),
        )

    def _leg(self, home: Home) -> Leg:
        return Leg(home.worker, self._knowledge.session_at(home.worker).welcome.epoch, home.partition)


def _demand(run: link_pb2.Run, affinity_key: bytes | None) -> Demand:
    return Demand(
        num_prompt=len(run.prompt_tokens),
        max_new_tokens=run.n * run.max_tokens,
        names=split_names(run.block_names),
        affinity_key=affinity_key,
    )


def rest_of(run: link_pb2.Run, choices: Sequence[ChoiceStream]) -> link_pb2.Run:
    """The rest of a request, under an id of its own, so that late messages of the last attempt concern nobody."""
    rest = link_pb2.Run()
    rest.CopyFrom(run)
    rest.request_id = secrets.token_bytes(REQUEST_ID_BYTES)
    mark_attempt(rest)
    if any(choice.token_ids for choice in choices):
        rest.ClearField("prompt_logprobs")  # they came with the first token
        going_on = (choice for choice in choices if not choice.is_ended)
        rest.resumed.extend(link_pb2.Resumed(choice=choice.index, token_ids=choice.token_ids) for choice in going_on)
    return rest
