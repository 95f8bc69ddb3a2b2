"""The account of one request: what it used and when, and from it the metrics.

A context manager, so that tokens of a request that was cut short are counted too (a client that leaves has still used
them). A request that moves is the worker's that decodes it, one that goes on elsewhere the last one's.
"""

import time
from dataclasses import dataclass
from types import TracebackType

from prometheus_client import Counter, Histogram

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.rpc.codec import decode_finish_reason
from moonshard.rpc.status import RequestError
from moonshard.serving.gateway.records.assignment import Assignment, SentAttempt
from moonshard.serving.gateway.records.metrics import GatewayMetrics
from moonshard.serving.gateway.records.stamps import Stamps
from moonshard.serving.gateway.workers.inbox import Arrival

_PHASES = ("gateway_queue", "first_token", "decode", "finish")


@dataclass(frozen=True, kw_only=True, slots=True)
class _SentTo:
    """Whom a request was sent to, and the metrics of its tokens: looked up once, used per token."""

    labels: tuple[str, str]
    is_moving: bool
    generation_tokens: Counter
    inter_token_s: Histogram


class RequestRecord:
    """Observes under the worker that got the request last. `with` it around the request's time on workers."""

    def __init__(self, metrics: GatewayMetrics, run: link_pb2.Run, stamps: Stamps, *, num_forced: int = 0) -> None:
        """`num_forced`: of the last prompt tokens, which are the beginning of each choice to whoever asked."""
        self._metrics = metrics
        self._worker: _SentTo | None = None  # until it is sent
        self.attempts: list[SentAttempt] = []  # those that are over
        self.assignment: Assignment | None = None  # of the last attempt, until it is sent
        self._attempt_sent_ns = 0
        self._attempt_error: RequestError | None = None
        self._run = run
        self.stamps = stamps
        self._num_forced = num_forced
        self.num_prompt = len(run.prompt_tokens) - num_forced
        self.max_tokens = run.max_tokens + num_forced
        self._num_cached = 0
        self._num_ended = 0
        self._finish_reasons = [""] * run.n
        self._num_tokens = [0] * run.n
        self._last_arrival_ns = [0] * run.n
        self._num_dropped = 0

    def __enter__(self) -> "RequestRecord":
        return self

    def __exit__(self, *_how: type[BaseException] | BaseException | TracebackType | None) -> None:
        if not self.is_sent:
            return
        if self._num_ended < self._run.n:
            self._metrics.finished_choices.labels(*self._labels, "abort").inc(self._run.n - self._num_ended)
        self._metrics.dropped_tokens.labels(*self._labels).inc(self._num_dropped)

    def sent(self, worker_index: int, assignment: Assignment) -> None:
        """To that worker, which will decode it."""
        self.assignment, self._attempt_sent_ns, self._attempt_error = assignment, time.perf_counter_ns(), None
        self.stamps.sent(self._attempt_sent_ns)
        labels = (self._metrics.model_name, str(worker_index))
        self._worker = _SentTo(
            labels=labels,
            is_moving=not assignment.is_local_prefill,
            generation_tokens=self._metrics.generation_tokens.labels(*labels),
            inter_token_s=self._metrics.inter_token_s.labels(*labels),
        )

    def attempt_failed(self, error: RequestError) -> None:
        """It is what ends the attempt; `attempt_ended` follows."""
        self._attempt_error = error

    def attempt_ended(self) -> None:
        """The attempt that was sent last is over, however it ended."""
        if self.assignment is None:
            raise RuntimeError("no attempt was sent")
        self.attempts.append(
            SentAttempt(
                assignment=self.assignment,
                sent_ns=self._attempt_sent_ns,
                ended_ns=time.perf_counter_ns(),
                error=self._attempt_error,
            )
        )

    @property
    def is_sent(self) -> bool:
        """Whether any worker got it, be it one that turned it down."""
        return self._worker is not None

    @property
    def has_begun(self) -> bool:
        """Whether anything has come back: its prompt was computed."""
        return self.stamps.first_arrival_ns > 0

    def retried(self) -> None:
        """Its worker or its handoff failed, and it is to go on elsewhere."""
        self.stamps.retried()

    def reserved(self, queue_ms: float) -> None:
        """A decode worker has room for it, after so long in that worker's line."""
        self.stamps.reserved(queue_ms)

    def moved(self, transfer: link_pb2.TransferPhases, transferred_ns: int) -> None:
        """Its KV is with the worker that decodes it."""
        self.stamps.transfer, self.stamps.transferred_ns = transfer, transferred_ns

    def arrived(self, arrival: Arrival, delta: pb.Delta | None) -> None:
        """A step's output, and what of it the client is told (None: nothing)."""
        output = arrival.output
        if delta is None:  # its choice has ended: how long that took is no part of the answer
            self._num_dropped += len(output.token_ids)
            return
        num_forced = 0 if self._last_arrival_ns[delta.choice] else self._num_forced  # they come with the first output
        self._num_dropped += num_forced + len(output.token_ids) - len(delta.token_ids)
        is_first = not self.has_begun
        self.stamps.arrived(arrival.arrived_ns, output)
        if is_first:
            self._num_cached = min(self.num_prompt - 1, output.cached_tokens)
            self._count_prompt()
        self._count_delta(delta, arrival.arrived_ns)

    def first_token(self) -> None:
        self._metrics.ttft_s.labels(*self._labels).observe(self.stamps.ttft_s())

    def finished(self, timing: pb.Timing) -> None:
        """All choices have ended: the whole request's durations and sizes."""
        metrics, labels, run = self._metrics, self._labels, self._run
        num_tokens = sum(self._num_tokens)
        metrics.e2e_s.labels(*labels).observe(timing.e2e_ms / 1e3)
        metrics.queue_s.labels(*labels).observe(timing.worker_queue_ms / 1e3)
        metrics.prefill_s.labels(*labels).observe(timing.worker_prefill_ms / 1e3)
        metrics.decode_s.labels(*labels).observe(timing.worker_decode_ms / 1e3)
        metrics.inference_s.labels(*labels).observe((timing.worker_prefill_ms + timing.worker_decode_ms) / 1e3)
        metrics.request_prompt_tokens.labels(*labels).observe(self.num_prompt)
        metrics.request_generation_tokens.labels(*labels).observe(num_tokens)
        metrics.params_n.labels(*labels).observe(run.n)
        metrics.params_max_tokens.labels(*labels).observe(self.max_tokens)
        longest = max(self._num_tokens)
        metrics.longest_generation_tokens.labels(*labels).observe(longest)
        if longest > 1:
            metrics.time_per_output_token_s.labels(*labels).observe(timing.decode_ms / 1e3 / (longest - 1))
        if self.stamps.transfer is not None:
            metrics.handoff_gap_s.labels(*labels).observe(timing.handoff_gap_ms / 1e3)
            metrics.exposed_transfer_s.labels(*labels).observe(timing.exposed_transfer_ms / 1e3)
        for phase in _PHASES:
            metrics.phase_s.labels(*labels, phase).observe(getattr(timing, f"{phase}_ms") / 1e3)

    def usage(self) -> pb.Usage:
        """What has been counted so far: before the first output nothing, not even the prompt.

        What was cached is what the worker found that computed the prompt; whoever goes on elsewhere finds more.
        """
        if not self.has_begun:
            return pb.Usage()
        return pb.Usage(
            prompt_tokens=self.num_prompt, completion_tokens=sum(self._num_tokens), cached_tokens=self._num_cached
        )

    @property
    def finish_reason(self) -> str:
        """Of the first choice; empty until it has ended."""
        return self._finish_reasons[0]

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Of each choice, of a request that is over: `abort` of one that was cut short, as in the metrics."""
        return tuple(reason or "abort" for reason in self._finish_reasons)

    @property
    def _sent_to(self) -> "_SentTo":
        if self._worker is None:
            raise RuntimeError("nothing is known of a request that was not sent")
        return self._worker

    @property
    def _labels(self) -> tuple[str, str]:
        return self._sent_to.labels

    def _count_prompt(self) -> None:
        self._metrics.prompt_tokens.labels(*self._labels).inc(self.num_prompt)
        by_source = self._metrics.prompt_tokens_by_source
        source = "external_kv_transfer" if self._sent_to.is_moving else "local_compute"
        by_source.labels(*self._labels, source).inc(self.num_prompt - self._num_cached)
        by_source.labels(*self._labels, "local_cache_hit").inc(self._num_cached)
        self._metrics.prefix_queries_tokens.labels(*self._labels).inc(self.num_prompt)
        self._metrics.prefix_hits_tokens.labels(*self._labels).inc(self._num_cached)

    def _count_delta(self, delta: pb.Delta, arrived_ns: int) -> None:
        self._num_tokens[delta.choice] += len(delta.token_ids)
        self._sent_to.generation_tokens.inc(len(delta.token_ids))
        if previous_ns := self._last_arrival_ns[delta.choice]:
            self._sent_to.inter_token_s.observe((arrived_ns - previous_ns) / 1e9)
        self._last_arrival_ns[delta.choice] = arrived_ns
        if (finish := decode_finish_reason(delta.finish_reason)) is not None:
            self._num_ended += 1
            finish = "stop" if finish == "tool_calls" else finish  # vLLM's names, which tell nothing of calls
            self._finish_reasons[delta.choice] = finish
            self._metrics.finished_choices.labels(*self._labels, finish).inc()
