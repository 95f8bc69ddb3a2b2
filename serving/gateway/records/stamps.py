"""When the events of one request happened, and the durations between them.

All stamps are of one clock in one process (`perf_counter_ns`); what a worker measured stays a duration. The four phases
partition the end-to-end time: each lasts until the next one's stamp. The wait for the first token has the lost attempts
in it, and of the last one what workers measured; what nobody did is the wire.
"""

import time
from dataclasses import dataclass, field
from itertools import pairwise

from moonshard.rpc import inference_pb2, link_pb2


@dataclass(kw_only=True, slots=True)
class Stamps:
    """Filled in as the request passes; a stamp is 0 until then."""

    received_ns: int
    sent_ns: int = 0  # the first time: what was lost with a worker is part of the wait
    first_attempt_ns: int = 0  # when the attempt was sent that gave the first token, or is to
    reserved_ms: float | None = None  # what this attempt waited for room on its decode worker; None: it needs none
    first_arrival_ns: int = 0
    first_delivered_ns: int = 0
    last_arrival_ns: int = 0
    first_two_ns: tuple[int, ...] = ()  # arrivals of choice 0's first two outputs
    phases: link_pb2.WorkerPhases = field(default_factory=link_pb2.WorkerPhases)
    has_decoded: bool = False  # a worker said how long it decoded
    ended_ns: int = 0
    transfer: link_pb2.TransferPhases | None = None  # of a request whose KV moved
    transferred_ns: int = 0  # its last manifest arrived
    num_retries: int = 0

    def sent(self, sent_ns: int) -> None:
        """An attempt. One that goes on behind the first token is none of that token's."""
        self.sent_ns = self.sent_ns or sent_ns
        if not self.first_arrival_ns:
            self.first_attempt_ns, self.reserved_ms = sent_ns, None
            self.transfer, self.transferred_ns = None, 0  # KV that moved in vain is no part of this one

    def reserved(self, queue_ms: float) -> None:
        """Of the attempt that was sent last, which came to a decode worker's line."""
        self.reserved_ms = queue_ms

    def retried(self) -> None:
        self.num_retries += 1

    def arrived(self, arrived_ns: int, output: link_pb2.SequenceOutput) -> None:
        is_first = not self.first_arrival_ns
        self.first_arrival_ns = self.first_arrival_ns or arrived_ns
        self.last_arrival_ns = arrived_ns
        if output.choice == 0 and len(self.first_two_ns) < 2:
            self.first_two_ns += (arrived_ns,)
        if output.HasField("phases"):
            self._merge(output.phases, is_first=is_first)
            self.has_decoded = self.has_decoded or bool(output.finish_reason)

    def _merge(self, phases: link_pb2.WorkerPhases, *, is_first: bool) -> None:
        """A later message repeats what it does not change, or leaves it at 0.

        The queue and prefill are those of the first token, and a part of the wait for it: not those of a request that
        goes on elsewhere, nor of a choice that had to wait for a slot of its own.
        """
        queue_ms, prefill_ms = self.phases.queue_ms, self.phases.prefill_ms
        self.phases.MergeFrom(phases)
        if not is_first:
            self.phases.queue_ms, self.phases.prefill_ms = queue_ms, prefill_ms

    def delivered(self) -> bool:
        """Whether this was the first time that tokens left the gateway."""
        if self.first_delivered_ns:
            return False
        self.first_delivered_ns = time.perf_counter_ns()
        return True

    def ttft_s(self) -> float:
        return (self.first_delivered_ns - self.received_ns) / 1e9

    def end(self) -> None:
        """Now, unless it has ended before."""
        self.ended_ns = self.ended_ns or time.perf_counter_ns()

    @property
    def has_joined(self) -> bool:
        """Whether a worker said that it decodes with KV that came from elsewhere."""
        return self.phases.land_ms + self.phases.join_ms > 0

    @property
    def e2e_ns(self) -> int:
        """Of a request that has ended."""
        return self.ended_ns - self.received_ns

    @property
    def lost_ns(self) -> int:
        """What attempts took that were lost before the first token, of a request that was sent."""
        return self.first_attempt_ns - self.sent_ns

    def phases_ns(self, *, is_complete: bool) -> tuple[int, int, int, int]:
        """Of a request that has ended: gateway's queue, wait for the first token, decode, finish.

        One that is not complete has the rest of its time in the phase it ended in.
        """
        ended_ns = self.ended_ns
        sent_ns, first_ns = self.sent_ns or ended_ns, self.first_arrival_ns or ended_ns
        last_ns = self.last_arrival_ns if is_complete else ended_ns
        return sent_ns - self.received_ns, first_ns - sent_ns, last_ns - first_ns, ended_ns - last_ns

    def timing(self) -> inference_pb2.Timing:
        """For a request that has had its last token, at the moment it ends."""
        self.end()
        phases_ms = [phase_ns / 1e6 for phase_ns in self.phases_ns(is_complete=True)]
        timing = self.worker_timing()
        timing.e2e_ms = self.e2e_ns / 1e6
        timing.ttft_ms = self.ttft_s() * 1e3
        timing.gateway_queue_ms, timing.first_token_ms, timing.decode_ms, timing.finish_ms = phases_ms
        timing.num_retries = self.num_retries
        return timing

    def worker_timing(self) -> inference_pb2.Timing:
        """What workers measured, and what the way to the first token took besides, of a request that has had it."""
        attempt_ms = (self.first_arrival_ns - self.first_attempt_ns) / 1e6
        reserved_ms = self.reserved_ms or 0.0
        timing = inference_pb2.Timing(
            worker_queue_ms=self.phases.queue_ms,
            worker_prefill_ms=self.phases.prefill_ms,
            worker_decode_ms=self.phases.decode_ms,
            wire_ms=attempt_ms - reserved_ms - self.phases.queue_ms - self.phases.prefill_ms,
            lost_ms=self.lost_ns / 1e6,
            decode_queue_ms=reserved_ms,
        )
        if self.transfer is not None:
            self._add_handoff(timing, self.transfer)
        return timing

    def _add_handoff(self, timing: inference_pb2.Timing, transfer: link_pb2.TransferPhases) -> None:
        """No gap where the first token was choice 0's last."""
        timing.handoff_gap_ms = sum(end - start for start, end in pairwise(self.first_two_ns)) / 1e6
        timing.transfer_ms = transfer.transfer_ms
        timing.exposed_transfer_ms = transfer.exposed_ms
        timing.land_ms = self.phases.land_ms
        timing.join_ms = self.phases.join_ms
