"""What the gateway counts itself: requests, tokens and times, under vLLM's names and our own.

A registry of its own, so that two gateways in one process do not share counts. Names, labels and bucket bounds of the
`vllm:` metrics are vLLM's, so that existing boards and autoscalers read them unchanged; `engine` is the worker's index.
What is counted of a request, and when, is in `request_metrics`; what workers report of themselves in `worker_metrics`.
"""

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric

from moonshard.serving.gateway.refusals import Limit

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
HELP = {
    "vllm:time_to_first_token_seconds": "From a request's arrival to its first token on the way to the client.",
    "vllm:inter_token_latency_seconds": "Between two outputs of one choice, as they arrive from the worker.",
    "vllm:request_time_per_output_token_seconds": (
        "Per finished request: mean time per token after the first, of its longest choice."
    ),
    "vllm:e2e_request_latency_seconds": "Per finished request: from its arrival to its end.",
    "vllm:request_queue_time_seconds": "Per finished request: time in the worker's queue.",
    "vllm:request_prefill_time_seconds": "Per finished request: from the worker's queue to its first token.",
    "vllm:request_decode_time_seconds": "Per finished request: from its first token on the worker to its last.",
    "vllm:request_inference_time_seconds": "Per finished request: prefill and decode together.",
    "vllm:request_prompt_tokens": "Per finished request: tokens of its prompt.",
    "vllm:request_generation_tokens": "Per finished request: tokens that the client got, of all choices.",
    "vllm:request_max_num_generation_tokens": "Per finished request: tokens of its longest choice that the client got.",
    "vllm:request_params_n": "Per finished request: choices asked for.",
    "vllm:request_params_max_tokens": "Per finished request: the most tokens that each choice might have.",
    "vllm:iteration_tokens_total": "Per step of a worker: tokens computed, of prompts and of completions.",
    "vllm:prompt_tokens": "Tokens of prompts, counted with a request's first output; once, however many choices.",
    "vllm:prompt_tokens_by_source": "Tokens of prompts by where their KV came from; the sources add up.",
    "vllm:generation_tokens": "Tokens that clients got, counted as they arrive from the worker.",
    "vllm:prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens of prompts that were found in the prefix cache, in a device's pages.",
    "vllm:external_prefix_cache_queries": (
        "Tokens of prompts that were not in the device's pages, where its worker has tiers below these."
    ),
    "vllm:external_prefix_cache_hits": "Tokens of prompts that came from tiers below a device's pages.",
    "vllm:request_success": "Choices by how they ended; abort: with their request, by its client or by an error.",
    "vllm:admission_rejections": "Requests refused on arrival, by the limit reached; not those that a worker refused.",
    "moonshard_request_phase_seconds": "Per finished request: its end-to-end time in parts that add up to it.",
    "moonshard_handoff_gap_seconds": (
        "Per finished request whose KV moved: from its first token to its second, of its first choice."
    ),
    "moonshard_exposed_transfer_seconds": (
        "Per finished request whose KV moved: how long it was still being sent when the first token was there."
    ),
    "moonshard_request_handoffs": "Begun between a prefill and a decode worker, those that failed included.",
    "moonshard_local_prefills": "Prompts that a decode worker computed itself: by rule, or as there was no other.",
    "moonshard_request_retries": "Requests that went on elsewhere, by what they had lost there.",
    "moonshard_cached_tokens": (
        "Tokens of prompts that need not be computed, by the tier that had them: device, host, store or ssd."
    ),
    "moonshard_dropped_tokens": "Tokens that a worker sent and the client never got: what stood after a stop string.",
    "moonshard_requests": "Requests by how they ended: completed, cancelled, or the gRPC status of their error.",
    "moonshard_http_requests": "HTTP responses begun, by route and status.",
    "moonshard_batches": "Batches that have ended, by the state in which they did.",
    "moonshard_batch_lines": "Lines of batches whose result is on disk: completed, or failed with a row that says why.",
    "moonshard_batch_retries": "Answers to lines of batches that found no room or no worker, and are asked again.",
    "moonshard_batch_store_failures": "Times that the disk did not take what batches.path was to keep.",
    "moonshard_unknown_fields": "Requests with fields that the gateway does not know; their answers name them.",
}


class GatewayRegistry(CollectorRegistry):
    """A registry without the `_created` samples, which in Prometheus' text format are gauges of their own that nobody
    reads.
    """

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
            yield metric


class GatewayMetrics:
    """The metrics of one gateway, each with what it counts in `HELP`."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = GatewayRegistry()
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
        self.longest_generation_tokens = self._histogram("vllm:request_max_num_generation_tokens", TOKEN_BUCKETS)
        self.params_n = self._histogram("vllm:request_params_n", CHOICE_BUCKETS)
        self.params_max_tokens = self._histogram("vllm:request_params_max_tokens", TOKEN_BUCKETS)
        self.step_tokens = self._histogram("vllm:iteration_tokens_total", STEP_TOKEN_BUCKETS)
        self.prompt_tokens = self._counter("vllm:prompt_tokens")
        self.prompt_tokens_by_source = self._counter("vllm:prompt_tokens_by_source", "source")
        self.generation_tokens = self._counter("vllm:generation_tokens")
        self.prefix_queries_tokens = self._counter("vllm:prefix_cache_queries")
        self.prefix_hits_tokens = self._counter("vllm:prefix_cache_hits")
        self.external_queries_tokens = self._counter("vllm:external_prefix_cache_queries")
        self.external_hits_tokens = self._counter("vllm:external_prefix_cache_hits")
        self.finished_choices = self._counter("vllm:request_success", "finished_reason")
        self.phase_s = self._histogram("moonshard_request_phase_seconds", TTFT_BUCKETS_S, "phase")
        self.handoff_gap_s = self._histogram("moonshard_handoff_gap_seconds", TTFT_BUCKETS_S)
        self.exposed_transfer_s = self._histogram("moonshard_exposed_transfer_seconds", TTFT_BUCKETS_S)
        self.handoffs = self._counter("moonshard_request_handoffs")
        self.local_prefills = self._counter("moonshard_local_prefills")
        self.retries = self._counter("moonshard_request_retries", "cause")
        self.cached_tokens = self._counter("moonshard_cached_tokens", "tier")
        self.dropped_tokens = self._counter("moonshard_dropped_tokens")
        self.outcomes = self._counter("moonshard_requests", labels=("outcome",))
        self.http_requests = self._counter("moonshard_http_requests", labels=("route", "status"))
        self.unknown_fields = self._counter("moonshard_unknown_fields", labels=())
        self.batches = self._counter("moonshard_batches", labels=("status",))
        self.batch_lines = self._counter("moonshard_batch_lines", labels=("outcome",))
        self.batch_retries = self._counter("moonshard_batch_retries", labels=())
        self.batch_store_failures = self._counter("moonshard_batch_store_failures", labels=())
        rejections = self._counter("vllm:admission_rejections", labels=("model_name", "reason"))
        self.rejections = {limit: rejections.labels(model_name, limit) for limit in get_args(Limit.__value__)}

    def _histogram(self, name: str, buckets: tuple[float, ...], *more_labels: str) -> Histogram:
        return Histogram(name, HELP[name], (*LABELS, *more_labels), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, *more_labels: str, labels: tuple[str, ...] = LABELS) -> Counter:
        return Counter(name, HELP[name], (*labels, *more_labels), registry=self.registry)
