"""When the events of one request happened, and the durations between them.

All stamps are of one clock in one process (`perf_counter_ns`); what a worker measured stays a duration. The four phases
partition the end-to-end time by construction: it is their sum.
"""

import time
from dataclasses import dataclass, field
from itertools import pairwise

from moonshard.rpc import inference_pb2, link_pb2


@dataclass(kw_only=True, slots=True)
class Stamps:
    """Filled in as the request passes; a stamp is 0 until then."""

    received_ns: int
    sent_ns: int = 0
    first_arrival_ns: int = 0
    first_delivered_ns: int = 0
    last_arrival_ns: int = 0
    phases: link_pb2.WorkerPhases = field(default_factory=link_pb2.WorkerPhases)

    def sent(self) -> None:
        self.sent_ns = time.perf_counter_ns()

    def arrived(self, arrived_ns: int, output: link_pb2.SequenceOutput) -> None:
        self.first_arrival_ns = self.first_arrival_ns or arrived_ns
        self.last_arrival_ns = arrived_ns
        if output.HasField("phases"):
            self.phases.MergeFrom(output.phases)  # a later message repeats what it does not change

    def delivered(self) -> bool:
        """Whether this was the first time that tokens left the gateway."""
        if self.first_delivered_ns:
            return False
        self.first_delivered_ns = time.perf_counter_ns()
        return True

    def ttft_s(self) -> float:
        return (self.first_delivered_ns - self.received_ns) / 1e9

    def timing(self) -> inference_pb2.Timing:
        """For a request that has had its last token, at the moment it ends."""
        ended_ns = time.perf_counter_ns()
        edges = (self.received_ns, self.sent_ns, self.first_arrival_ns, self.last_arrival_ns, ended_ns)
        phases_ms = [(end - start) / 1e6 for start, end in pairwise(edges)]
        return inference_pb2.Timing(
            e2e_ms=sum(phases_ms),
            ttft_ms=self.ttft_s() * 1e3,
            gateway_queue_ms=phases_ms[0],
            first_token_ms=phases_ms[1],
            decode_ms=phases_ms[2],
            finish_ms=phases_ms[3],
            worker_queue_ms=self.phases.queue_ms,
            worker_prefill_ms=self.phases.prefill_ms,
            worker_decode_ms=self.phases.decode_ms,
            wire_ms=phases_ms[1] - self.phases.queue_ms - self.phases.prefill_ms,
        )
