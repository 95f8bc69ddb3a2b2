"""When the events of one request happened, and the durations between them.

All stamps are of one clock in one process (`perf_counter_ns`); what a worker measured stays a duration. The four phases
partition the end-to-end time: each lasts until the next one's stamp. The wait for the first token has the lost attempts
in it, and of the last one what workers measured; what nobody did is the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moonshard.rpc import inference_pb2, link_pb2
from moonshard.serving.gateway.records.events import (
    AttemptMoved,
    AttemptReserved,
    AttemptSent,
    FirstDelivered,
    LogEvent,
    RequestEnded,
    RequestReceived,
    RequestRetried,
    TokensArrived,
)
from moonshard.serving.gateway.records.outputs import OutputTally


@dataclass(kw_only=True, slots=True)
class RequestTimes:
    """The times of a request that has ended, read from its log. A stamp of what did not happen is 0."""

    outputs: OutputTally
    received_ns: int = 0
    sent_ns: int = 0  # the first time: what was lost with a worker is part of the wait
    first_attempt_ns: int = 0  # when the attempt was sent that gave the first token, or was to
    reserved_ms: float | None = None  # what this attempt waited for room on its decode worker; None: it needed none
    first_delivered_ns: int = 0
    ended_ns: int = 0
    transfer: link_pb2.TransferPhases | None = None  # of a request whose KV moved
    transferred_ns: int = 0  # its last manifest arrived
    num_retries: int = 0
    is_complete: bool = False  # it has had all its tokens

    @classmethod
    def of(cls, events: Sequence[LogEvent], outputs: OutputTally) -> "RequestTimes":
        times, has_begun = cls(outputs=outputs), False
        for event in events:
            has_begun = has_begun or isinstance(event, TokensArrived)
            times._add(event, has_begun=has_begun)
        return times

    def _add(self, event: LogEvent, *, has_begun: bool) -> None:
        at_ns = event.at_ns
        match event:
            case RequestReceived():
                self.received_ns = at_ns
            case AttemptSent():
                self.sent_ns = self.sent_ns or at_ns
                if not has_begun:  # one that goes on behind the first token is none of that token's
                    self.first_attempt_ns, self.reserved_ms = at_ns, None
                    self.transfer, self.transferred_ns = None, 0  # KV that moved in vain is no part of this one
            case AttemptReserved(queue_ms=queue_ms):
                self.reserved_ms = queue_ms
            case AttemptMoved(transfer=transfer):
                self.transfer, self.transferred_ns = transfer, at_ns
            case RequestRetried():
                self.num_retries += 1
            case FirstDelivered():
                self.first_delivered_ns = at_ns
            case RequestEnded(is_complete=is_complete):
                self.ended_ns, self.is_complete = at_ns, is_complete
            case _:
                pass

    @property
    def ttft_ns(self) -> int | None:
        """The time to the first delivered token; None where nothing was delivered."""
        return self.first_delivered_ns - self.received_ns if self.first_delivered_ns else None

    @property
    def e2e_ns(self) -> int:
        return self.ended_ns - self.received_ns

    @property
    def lost_ns(self) -> int:
        """How long the attempts took that were lost before the first token."""
        return self.first_attempt_ns - self.sent_ns

    @property
    def phases_ns(self) -> tuple[int, int, int, int]:
        """The four phases: the gateway's queue, the wait for the first token, decode, finish.

        A request that is not complete has the rest of its time in the phase in which it ended.
        """
        ended_ns = self.ended_ns
        sent_ns, first_ns = self.sent_ns or ended_ns, self.outputs.first_ns or ended_ns
        last_ns = self.outputs.last_ns if self.is_complete else ended_ns
        return sent_ns - self.received_ns, first_ns - sent_ns, last_ns - first_ns, ended_ns - last_ns

    @property
    def handoff_gap_ns(self) -> int | None:
        """Between choice 0's first two outputs; None where its first one was its last."""
        first = self.outputs.choices[0]
        return first.second_ns - first.first_ns if first.second_ns else None

    def timing(self) -> inference_pb2.Timing:
        """The timing of a request that has had all its tokens."""
        phases_ms = [phase_ns / 1e6 for phase_ns in self.phases_ns]
        timing = self.worker_timing()
        timing.e2e_ms = self.e2e_ns / 1e6
        timing.ttft_ms = (self.ttft_ns or 0) / 1e6
        timing.gateway_queue_ms, timing.first_token_ms, timing.decode_ms, timing.finish_ms = phases_ms
        timing.num_retries, timing.num_outputs = self.num_retries, self.outputs.num_outputs
        return timing

    def worker_timing(self) -> inference_pb2.Timing:
        """What workers measured of a request that has had its first token, and how much longer the first token took on
        its way.
        """
        phases, transfer = self.outputs.phases, self.transfer
        attempt_ms = (self.outputs.first_ns - self.first_attempt_ns) / 1e6
        reserved_ms = self.reserved_ms or 0.0
        timing = inference_pb2.Timing(
            worker_queue_ms=phases.queue_ms,
            worker_prefill_ms=phases.prefill_ms,
            worker_decode_ms=phases.decode_ms,
            wire_ms=attempt_ms - reserved_ms - phases.queue_ms - phases.prefill_ms,
            lost_ms=self.lost_ns / 1e6,
            decode_queue_ms=reserved_ms,
        )
        if transfer is not None:
            timing.handoff_gap_ms = (self.handoff_gap_ns or 0) / 1e6
            timing.transfer_ms = transfer.transfer_ms
            timing.exposed_transfer_ms = transfer.exposed_ms
            timing.land_ms, timing.join_ms = phases.land_ms, phases.join_ms
        return timing
