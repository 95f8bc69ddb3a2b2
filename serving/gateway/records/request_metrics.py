"""One request as metrics, counted as its log is appended to: tokens of one that is cut short were used all the same.

A request that moves is counted under the worker that decodes it, one that goes on elsewhere under the last one.
"""

from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from moonshard.serving.gateway.records.events import (
    AttemptSent,
    FirstDelivered,
    LogEvent,
    RequestEnded,
    RequestRetried,
    TokensArrived,
)
from moonshard.serving.gateway.records.log import RequestLog
from moonshard.serving.gateway.records.metrics import GatewayMetrics
from moonshard.serving.gateway.records.outputs import ChoiceOutputs

_PHASES = ("gateway_queue", "first_token", "decode", "finish")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Engine:
    """The worker that a request was sent to last, and the metrics of its tokens: looked up once and then used for each
    token.
    """

    labels: tuple[str, str]
    is_moving: bool
    has_tiers: bool
    generation_tokens: Counter
    inter_token_s: Histogram


class RequestMetrics:
    """A reader of one log."""

    def __init__(self, metrics: GatewayMetrics, log: RequestLog) -> None:
        self._metrics = metrics
        self._log = log
        self._engine: _Engine | None = None  # until it is sent
        self._has_begun = False

    def __call__(self, event: LogEvent) -> None:
        match event:
            case TokensArrived():
                if event.delta is not None:
                    self._arrived(self._log.outputs.choices[event.delta.choice])
            case AttemptSent():
                self._sent(event)
            case RequestRetried(cause=cause):
                self._metrics.retries.labels(*self._labels, cause).inc()
            case FirstDelivered(at_ns=at_ns):
                received_ns = self._log.request.received_ns
                self._metrics.ttft_s.labels(*self._labels).observe((at_ns - received_ns) / 1e9)
            case RequestEnded():
                self._ended(event)
            case _:
                pass

    @property
    def _labels(self) -> tuple[str, str]:
        if self._engine is None:
            raise RuntimeError("the request was not sent")
        return self._engine.labels

    def _sent(self, sent: AttemptSent) -> None:
        metrics, labels = self._metrics, (self._metrics.model_name, str(sent.worker_index))
        is_moving = not sent.assignment.is_local_prefill
        if is_moving:
            metrics.handoffs.labels(*labels).inc()
        if sent.is_prefill_at_decode:
            metrics.local_prefills.labels(*labels).inc()
        self._engine = _Engine(
            labels=labels,
            is_moving=is_moving,
            has_tiers=sent.has_tiers,
            generation_tokens=metrics.generation_tokens.labels(*labels),
            inter_token_s=metrics.inter_token_s.labels(*labels),
        )

    def _arrived(self, choice: ChoiceOutputs) -> None:
        """Its last output. Run for every token."""
        engine = self._engine
        if engine is None:
            raise RuntimeError("the request was not sent")
        if not self._has_begun:
            self._has_begun = True
            self._count_prompt(engine)
        engine.generation_tokens.inc(choice.num_new_tokens)
        if choice.second_ns:
            engine.inter_token_s.observe(choice.gap_ns / 1e9)
        if choice.finish_reason:
            self._metrics.finished_choices.labels(*engine.labels, choice.finish_reason).inc()

    def _count_prompt(self, engine: _Engine) -> None:
        """To vLLM what tiers below the device gave is external, and no hit of the device's prefix cache."""
        metrics, labels, by_tier = self._metrics, engine.labels, self._log.cached_by_tier
        num_prompt, num_cached = self._log.tokenized.num_prompt_tokens, self._log.num_cached_tokens
        num_below = sum(by_tier.values())
        num_device = num_cached - num_below
        metrics.prompt_tokens.labels(*labels).inc(num_prompt)
        source = "external_kv_transfer" if engine.is_moving else "local_compute"
        metrics.prompt_tokens_by_source.labels(*labels, source).inc(num_prompt - num_cached)
        metrics.prompt_tokens_by_source.labels(*labels, "local_cache_hit").inc(num_device)
        metrics.prefix_queries_tokens.labels(*labels).inc(num_prompt)
        metrics.prefix_hits_tokens.labels(*labels).inc(num_device)
        for tier, num_tokens in {"device": num_device, **by_tier}.items():
            metrics.cached_tokens.labels(*labels, tier).inc(num_tokens)
        if num_below or engine.has_tiers:
            metrics.prompt_tokens_by_source.labels(*labels, "external_kv_transfer").inc(num_below)
            metrics.external_queries_tokens.labels(*labels).inc(num_prompt - num_device)
            metrics.external_hits_tokens.labels(*labels).inc(num_below)

    def _ended(self, ended: RequestEnded) -> None:
        self._metrics.outcomes.labels(ended.outcome).inc()
        if ended.limit is not None:
            self._metrics.rejections[ended.limit].inc()
        if self._engine is None:
            return
        labels, outputs, asked = self._engine.labels, self._log.outputs, self._log.tokenized
        if num_aborted := asked.num_choices - outputs.num_ended:
            self._metrics.finished_choices.labels(*labels, "abort").inc(num_aborted)
        num_forced = asked.num_forced_tokens * outputs.num_begun  # no worker sent these
        self._metrics.dropped_tokens.labels(*labels).inc(outputs.num_received_tokens + num_forced - outputs.num_tokens)
        if ended.is_complete:
            self._completed(labels)

    def _completed(self, labels: tuple[str, str]) -> None:
        """The whole request's durations and sizes."""
        metrics, asked, choices = self._metrics, self._log.tokenized, self._log.outputs.choices.values()
        timing = self._log.timing
        metrics.e2e_s.labels(*labels).observe(timing.e2e_ms / 1e3)
        metrics.queue_s.labels(*labels).observe(timing.worker_queue_ms / 1e3)
        metrics.prefill_s.labels(*labels).observe(timing.worker_prefill_ms / 1e3)
        metrics.decode_s.labels(*labels).observe(timing.worker_decode_ms / 1e3)
        metrics.inference_s.labels(*labels).observe((timing.worker_prefill_ms + timing.worker_decode_ms) / 1e3)
        metrics.request_prompt_tokens.labels(*labels).observe(asked.num_prompt_tokens)
        metrics.request_generation_tokens.labels(*labels).observe(self._log.outputs.num_tokens)
        metrics.params_n.labels(*labels).observe(asked.num_choices)
        metrics.params_max_tokens.labels(*labels).observe(asked.max_tokens)
        longest = max(choice.num_tokens for choice in choices)
        metrics.longest_generation_tokens.labels(*labels).observe(longest)
        if longest > 1:
            metrics.time_per_output_token_s.labels(*labels).observe(timing.decode_ms / 1e3 / (longest - 1))
        if self._log.times.transfer is not None:
            metrics.handoff_gap_s.labels(*labels).observe(timing.handoff_gap_ms / 1e3)
            metrics.exposed_transfer_s.labels(*labels).observe(timing.exposed_transfer_ms / 1e3)
        for phase in _PHASES:
            metrics.phase_s.labels(*labels, phase).observe(getattr(timing, f"{phase}_ms") / 1e3)
