"""The handoffs of a gateway: the shell around the pure `GatewaySide`, between it and the workers' links.

Workers' messages become its verbs, its actions become messages; what concerns the client goes into the request's inbox
(P's first tokens as arrivals, the end of a handoff as `HandoffFailed`). Which workers take part, and what follows a
failure, is decided in `control.dispatch`.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError, Unavailable, error_from_code
from moonshard.serving.control.dispatch.attempt import Attempt, AttemptLeg
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff.gateway import (
    Deliver,
    GatewayAction,
    GatewaySide,
    Outcome,
    SendDecode,
    SendPrefill,
)
from moonshard.serving.gateway.failures import HandoffFailed
from moonshard.serving.gateway.records.events import AttemptMoved, AttemptReserved
from moonshard.serving.gateway.records.log import RequestLog
from moonshard.serving.gateway.workers.inbox import Arrival, Inbox
from moonshard.serving.gateway.workers.knowledge import Knowledge
from moonshard.serving.gateway.workers.session import WorkerSession
from moonshard.serving.wire import handoffs as handoff_wire
from moonshard.serving.wire.relayed import (
    RelayedCredits,
    RelayedManifest,
    RelayedTarget,
    relayed_credits,
    relayed_manifest,
    relayed_target,
)

TICK_S = 0.25


@dataclass(kw_only=True, slots=True)
class Handoff:
    """One handoff under way: what an attempt with a prefill leg is to its gateway."""

    run: link_pb2.Run
    log: RequestLog
    endpoint: link_pb2.KvEndpoint  # of the decode worker
    attempt: Attempt
    prefill: AttemptLeg
    inbox: Inbox
    has_first_tokens: bool = False
    transfer: link_pb2.TransferPhases | None = None  # once its last chunk is here
    retry_after_s: float = 0.0  # as a worker without room said

    @property
    def is_prefilled(self) -> bool:
        """The prefill worker has nothing left to do for it."""
        return self.has_first_tokens and self.transfer is not None


class Handoffs:
    """All handoffs of one gateway. `receive` and `lost` are called by the links."""

    def __init__(self, knowledge: Knowledge, *, lease_s: float) -> None:
        self._knowledge = knowledge
        self._dispatcher = knowledge.dispatcher
        self._lease_s = lease_s
        self._side = GatewaySide()
        self._handoffs: dict[bytes, Handoff] = {}
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def num_handoffs(self) -> int:
        return len(self._handoffs)

    def begin(
        self, run: link_pb2.Run, log: RequestLog, attempt: Attempt, prefill: AttemptLeg, *, decode: WorkerSession
    ) -> Handoff:
        """Reserve on `decode`, in the run's partition; the run's id becomes the handoff's.

        Everything that happens to the request comes through the inbox. Its caller calls `end` exactly once.
        """
        handoff = Handoff(
            run=run,
            log=log,
            endpoint=decode.welcome.endpoint,
            attempt=attempt,
            prefill=prefill,
            inbox=decode.open(run.request_id),
        )
        self._handoffs[run.request_id] = handoff
        reserve = m.Reserve(handoff=run.request_id, writer_epoch=prefill.epoch, lease_s=self._lease_s)
        self._execute(self._side.begin(reserve, decode.epoch, time.monotonic()))
        self._tick_later()
        return handoff

    def end(self, handoff: Handoff, *, decode: WorkerSession, is_finished: bool) -> None:
        """The request has its last token, or is given up: both legs are told at once."""
        handoff_id = handoff.run.request_id
        if is_finished:
            self._execute(self._side.finished(m.Finished(handoff=handoff_id, epoch=decode.epoch)))
        else:
            self._execute(self._side.cancel(handoff_id))
        self._handoffs.pop(handoff_id, None)
        self._dispatcher.prefill_over(handoff.attempt)
        decode.close(handoff_id, cancel=False)

    # ---- what the links say

    def receive(self, session: WorkerSession, message: link_pb2.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "target":
                self._target(message.target)
            case "credits":
                self._execute(self._side.credits(relayed_credits(message.credits)))
            case "chunk":
                self._chunk(message.chunk)
            case "first_tokens":
                self._first_tokens(message.first_tokens)
            case "drained":
                self._execute(self._side.drained(handoff_wire.drained_from(message.drained)))
            case "failed":
                self._failed(session, message.failed)
            case _:
                pass  # no part of a handoff

    def lost(self, session: WorkerSession) -> None:
        self._execute(self._side.peer_gone(session.epoch))

    def _target(self, target: link_pb2.Target) -> None:
        if (handoff := self._handoffs.get(target.handoff)) is not None:
            handoff.log.append(AttemptReserved(target.queue_ms))
        self._execute(self._side.target(relayed_target(target)))

    def _chunk(self, chunk: link_pb2.Manifest) -> None:
        self._execute(self._side.chunk(relayed_manifest(chunk)))
        handoff = self._handoffs.get(chunk.handoff)
        if handoff is not None and chunk.is_last:
            handoff.transfer = chunk.phases
            handoff.log.append(AttemptMoved(chunk.phases))
            self._close_prefill_leg(handoff)

    def _first_tokens(self, first: link_pb2.FirstTokens) -> None:
        self._execute(self._side.first_tokens(handoff_wire.first_tokens_from(first)), first.outputs)
        if (handoff := self._handoffs.get(first.handoff)) is not None:
            handoff.has_first_tokens = True
            self._close_prefill_leg(handoff)

    def _failed(self, session: WorkerSession, failed: link_pb2.Failed) -> None:
        """A worker gave its leg up or refused it. Where it refused, the request gets the worker's own error."""
        handoff = self._handoffs.get(failed.request_id)
        cause = handoff_wire.cause_from(failed)
        if handoff is not None:
            handoff.retry_after_s = failed.retry_after_s
        if cause is None:
            self._refused(session, failed)
        else:
            self._execute(self._side.failed(m.Failed(handoff=failed.request_id, epoch=session.epoch, cause=cause)))

    def _refused(self, session: WorkerSession, failed: link_pb2.Failed) -> None:
        error = error_from_code(failed.code, failed.message, failed.field, failed.retry_after_s)
        is_for_now = isinstance(error, Unavailable)
        if not is_for_now:
            self._tell(failed.request_id, error)
        self._execute(self._side.refused(failed.request_id, session.epoch, is_for_now=is_for_now))

    # ---- what the side decides

    def _execute(self, actions: Iterable[GatewayAction], first_outputs: Iterable[link_pb2.SequenceOutput] = ()) -> None:
        arrived_ns = time.perf_counter_ns()
        for action in actions:
            match action:
                case SendPrefill(epoch, message) | SendDecode(epoch, message):
                    self._send(epoch, message)
                case Deliver(handoff_id, _tokens):
                    for output in first_outputs:
                        self._tell(handoff_id, Arrival(arrived_ns, output))
                case Outcome(handoff_id, cause):
                    self._over(handoff_id, cause)

    def _send(self, epoch: int, message: m.ToPrefill | m.ToDecode) -> None:
        """Drops the message where the worker is gone, since all that it held is gone with it."""
        session = self._knowledge.session_of(epoch)
        if session is not None:
            session.send(self._message(message))
            if isinstance(message, m.Run):
                self._knowledge.sent(session, self._handoffs[message.target.handoff].prefill)

    def _message(self, message: m.ToPrefill | m.ToDecode) -> link_pb2.GatewayMessage:
        match message:
            case m.Reserve(handoff=handoff_id):
                reserve = handoff_wire.reserve_message(message, self._handoffs[handoff_id].run)
                return link_pb2.GatewayMessage(reserve=reserve)
            case m.Run(target=RelayedTarget(handoff=handoff_id, message=target)):
                handoff = self._handoffs[handoff_id]
                run = handoff_wire.run_message(handoff.run, target, handoff.endpoint, handoff.prefill.home.partition)
                return link_pb2.GatewayMessage(run=run)
            case RelayedManifest(message=manifest):
                return link_pb2.GatewayMessage(landed=manifest)
            case m.Start(handoff=handoff_id, tokens=tokens, last=RelayedManifest(message=last), guesses=guesses):
                start = handoff_wire.start_message(handoff_id, tokens, last, guesses)
                return link_pb2.GatewayMessage(start=start)
            case RelayedCredits(message=credits):
                return link_pb2.GatewayMessage(credits=credits)
            case m.Cancel():
                return link_pb2.GatewayMessage(cancel=handoff_wire.cancel_message(message))
            case m.Drained():
                return link_pb2.GatewayMessage(drained=handoff_wire.drained_message(message))
            case _:
                raise ValueError(f"relayed is what came over a link, not {message!r}")

    def _over(self, handoff_id: bytes, cause: m.Cause | None) -> None:
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            return
        self._dispatcher.prefill_over(handoff.attempt)
        if cause is not None:
            handoff.inbox.put_nowait(HandoffFailed(cause, retry_after_s=handoff.retry_after_s))

    def _tell(self, handoff_id: bytes, item: Arrival | RequestError) -> None:
        if (handoff := self._handoffs.get(handoff_id)) is not None:
            handoff.inbox.put_nowait(item)

    def _close_prefill_leg(self, handoff: Handoff) -> None:
        if handoff.is_prefilled:
            self._dispatcher.prefill_over(handoff.attempt)

    def _tick_later(self) -> None:
        if self._ticking is None and self._handoffs:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self._execute(self._side.expire(time.monotonic()))
        self._tick_later()
