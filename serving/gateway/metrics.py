"""What the gateway counts itself: requests, tokens and times, under vLLM's names and our own.

A registry of its own, so that two gateways in one process do not share counts. Names, labels and bucket bounds of the
`vllm:` metrics are vLLM's, so that existing boards and autoscalers read them unchanged; `engine` is the worker's index.
What workers report of themselves is in `worker_metrics`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from moonshard.rpc.status import RequestError

LABELS = ("model_name", "engine")
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TPOT_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20),
    *(30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKEN_BUCKETS = (1, *(2**power for power in range(3, 15)))
CHOICE_BUCKETS = (1, 2, 5, 10, 20)


class GatewayMetrics:
    """The metrics of one gateway. Observe through the children that `of_engine` gives."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.ttft_s = self._histogram("vllm:time_to_first_token_seconds", TTFT_BUCKETS_S)
        self.inter_token_s = self._histogram("vllm:inter_token_latency_seconds", TPOT_BUCKETS_S)
        self.time_per_output_token_s = self._histogram("vllm:request_time_per_output_token_seconds", TPOT_BUCKETS_S)
        self.e2e_s = self._histogram("vllm:e2e_request_latency_seconds", E2E_BUCKETS_S)
        self.queue_s = self._histogram("vllm:request_queue_time_seconds", E2E_BUCKETS_S)
        self.prefill_s = self._histogram("vllm:request_prefill_time_seconds", E2E_BUCKETS_S)
        self.decode_s = self._histogram("vllm:request_decode_time_seconds", E2E_BUCKETS_S)
        self.inference_s = self._histogram("vllm:request_inference_time_seconds", E2E_BUCKETS_S)
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", TOKEN_BUCKETS)
        self.request_generation_tokens = self._histogram("vllm:request_generation_tokens", TOKEN_BUCKETS)
        self.params_n = self._histogram("vllm:request_params_n", CHOICE_BUCKETS)
        self.params_max_tokens = self._histogram("vllm:request_params_max_tokens", TOKEN_BUCKETS)
        self.step_tokens = self._histogram("vllm:iteration_tokens_total", STEP_TOKEN_BUCKETS)
        self.prompt_tokens = self._counter("vllm:prompt_tokens")
        self.generation_tokens = self._counter("vllm:generation_tokens")
        self.prefix_queries_tokens = self._counter("vllm:prefix_cache_queries")
        self.prefix_hits_tokens = self._counter("vllm:prefix_cache_hits")
        self.finished_choices = self._counter("vllm:request_success", "finished_reason")
        self.phase_s = self._histogram("moonshard_request_phase_seconds", TTFT_BUCKETS_S, "phase")
        self.dropped_tokens = self._counter("moonshard_dropped_tokens")
        self.outcomes = Counter(
            "moonshard_requests", "Requests by how they ended.", ("outcome",), registry=self.registry
        )
        self.http_requests = Counter(
            "moonshard_http_requests", "HTTP responses begun.", ("route", "status"), registry=self.registry
        )

    @contextmanager
    def outcome(self) -> Iterator[None]:
        """Count how the request that is the block ended."""
        outcome = "internal_error"
        try:
            yield
            outcome = "completed"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except RequestError as error:
            outcome = error.code.name.lower()
            raise
        finally:
            self.outcomes.labels(outcome).inc()

    def _histogram(self, name: str, buckets: tuple[float, ...], *more_labels: str) -> Histogram:
        return Histogram(name, _text(name), (*LABELS, *more_labels), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, *more_labels: str) -> Counter:
        return Counter(name, _text(name), (*LABELS, *more_labels), registry=self.registry)


def _text(name: str) -> str:
    return name.split(":")[-1].removeprefix("moonshard_").replace("_", " ").capitalize() + "."
