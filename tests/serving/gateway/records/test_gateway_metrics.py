"""What /metrics says after a scripted run."""

import asyncio
import math
import re
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonshard.kv.prefix import NAME_BYTES
from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.fake_worker import NUM_BLOCKS, FakeWorker

ASKED = {"model": "kimi", "prompt": [1, 2, 3], "max_tokens": 6}
KV_TIER = link_pb2.KvTier(
    name="host",
    num_hits=1,
    num_misses={"absent": 2, "timed_out": 3},
    num_kept=4,
    num_not_kept=5,
    num_evicted=6,
    read_bytes=7,
    written_bytes=8,
    held_bytes=9,
)
KV_STORE = link_pb2.KvStore(
    tiers=[
        KV_TIER,
        link_pb2.KvTier(name="ssd", num_hits=20, held_bytes=21),
        link_pb2.KvTier(name="store", num_hits=22, is_up=True),
    ],
    num_late_fetches=10,
    num_queued_blocks=11,
    num_dropped_blocks=12,
    num_lost_blocks=13,
    num_aside_blocks=14,
)
# vLLM's names as boards and autoscalers spell them.
VLLM_NAMES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"),
    *("vllm:num_requests_waiting_by_reason", "vllm:prompt_tokens_by_source_total", "vllm:admission_rejections_total"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    *("vllm:request_time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket"),
    *("vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket"),
    *("vllm:request_decode_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket", "vllm:iteration_tokens_total_bucket"),
}
TIER_NAMES = {
    *("moonshard_tier_hits_total", "moonshard_tier_misses_total", "moonshard_tier_kept_blocks_total"),
    *("moonshard_tier_not_kept_blocks_total", "moonshard_tier_evicted_blocks_total", "moonshard_tier_read_bytes_total"),
    *("moonshard_tier_written_bytes_total", "moonshard_tier_late_fetches_total"),
    *("moonshard_tier_dropped_blocks_total", "moonshard_tier_lost_blocks_total"),
    *("moonshard_tier_held_bytes", "moonshard_tier_queued_blocks", "moonshard_tier_lacking_blocks"),
    *("moonshard_cached_tokens_total", "moonshard_tier_up"),
}

LATENCIES = (
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
)
# The 27 queries of vLLM's Grafana board, examples/observability/prometheus_grafana/grafana.json: what each selects by
# `model_name`, and the label by which it sums, if by any.
BOARD: list[tuple[str, str | None]] = [
    *((f"{name}_bucket", "le") for name in LATENCIES for _ in ("P99", "P95", "P90", "P50")),
    *((f"{name}_sum / {name}_count", None) for name in LATENCIES),
    ("vllm:prompt_tokens_total", None),
    ("vllm:generation_tokens_total", None),
    ("vllm:num_requests_running", None),
    ("vllm:num_requests_waiting", None),
    ("vllm:kv_cache_usage_perc", None),
    ("vllm:request_prompt_tokens_bucket", "le"),
    ("vllm:request_generation_tokens_bucket", "le"),
    ("vllm:request_success_total", "finished_reason"),
    ("vllm:request_queue_time_seconds_sum", None),
    ("vllm:request_prefill_time_seconds_sum", None),
    ("vllm:request_decode_time_seconds_sum", None),
    ("vllm:request_max_num_generation_tokens_sum", None),
]


async def samples(http: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Value by (name, label values in the order of label names)."""
    text = (await http.get("/metrics")).text
    return dict(_flat(text))


def _flat(text: str) -> Iterator[tuple[tuple[str, ...], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield (sample.name, *(value for _, value in sorted(sample.labels.items()))), sample.value


@pytest.mark.parametrize("gateway_config", [GatewayConfig(port=0, grpc_port=0, max_queued_requests=1)])
async def test_every_metric_moves_in_a_run_that_does_everything(
    http: httpx.AsyncClient, running: RunningGateway, worker: FakeWorker
):
    idle = await samples(http)
    worker.script.cached_tokens, worker.script.cached_by_tier = 2, {"host": 1}
    worker.load.kv_store.CopyFrom(KV_STORE)
    worker.load.num_preemptions = 2
    worker.load.wasted_tokens = 4
    worker.load.overlapped_steps = 5
    worker.load.num_drafts, worker.load.draft_tokens, worker.load.accepted_tokens = 2, 5, 3
    worker.load.accepted_per_position[:] = [2, 1, 0]
    worker.load.num_model_drafts, worker.load.model_accepted_tokens = 300, 6
    worker.load.num_lost_spans = 7
    worker.load.num_lost_rows = 8
    worker.load.num_compilations = 6
    worker.load.num_compilations_while_serving = 1
    worker.load.num_waiting = 3
    worker.load.queued_tokens[:] = [3, 4]
    worker.load.active_tokens[:] = [8]
    worker.load.peak_memory_bytes = 9
    worker.load.free_blocks[0] = 10
    await http.post("/v1/completions", json=ASKED)
    await http.post("/v1/completions", json=ASKED | {"n": 2, "stop_token_ids": list(range(16))[:14], "max_tokens": 50})
    await http.post("/v1/completions", json=ASKED | {"prompt": [], "colour": 1})
    worker.script.next_token = lambda _choice, _last, _position: 33  # "B"
    await http.post("/v1/completions", json=ASKED | {"stop": ["BB"], "n": 2})
    worker.script.may_step.clear()
    held = asyncio.create_task(http.post("/v1/completions", json=ASKED))
    await worker.seen(len(worker.runs) + 1)
    assert (await http.post("/v1/completions", json=ASKED)).status_code == 429
    worker.script.may_step.set()
    await held
    await worker.say(link_pb2.WorkerMessage(prefix_snapshot=link_pb2.PrefixSnapshot(names=[bytes(NAME_BYTES)])))
    worker.send_load(draining=True)
    await running.gateway.pool.wait_not_ready()
    busy = await samples(http)
    names = {key[0] for key in busy}
    assert names >= VLLM_NAMES | TIER_NAMES
    of_worker = {f"moonshard_worker_{name}" for name in ("start_seconds", "up", "info", "kernels")}
    still = {"vllm:cache_config_info", *of_worker}
    never = {"moonshard_worker_restarts_total", "moonshard_reserved_tokens"}  # nothing restarted, nothing is held now
    of_batches = {"moonshard_batch_retries_total", "moonshard_batch_store_failures_total"}  # which are off here
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [busy[per_pos, "0", "kimi", str(place)] for place in range(3)] == [2, 1, 0]
    address = running.gateway.pool.links[0].address
    assert busy["moonshard_draft_accept_length", address] == 1 + 6 / 300
    assert busy["moonshard_draft_misfit", address] == 1
    for name in names - still - never - of_batches:
        values = {key: value for key, value in busy.items() if key[0] == name}
        assert any(idle.get(key) != value for key, value in values.items()), name


async def test_counts_are_those_of_the_requests(http: httpx.AsyncClient, grpc_client: AsyncClient, worker: FakeWorker):
    worker.script.cached_tokens = 2
    await http.post("/v1/completions", json=ASKED)
    await grpc_client.generate([1, 2, 3, 4], max_tokens=5, n=2)
    found = await samples(http)
    assert found["vllm:prompt_tokens_total", "0", "kimi"] == 3 + 4
    assert found["vllm:generation_tokens_total", "0", "kimi"] == 6 + 10
    assert found["vllm:prefix_cache_queries_total", "0", "kimi"] == 3 + 4
    assert found["vllm:prefix_cache_hits_total", "0", "kimi"] == 2 + 2
    assert found["vllm:prompt_tokens_by_source_total", "0", "kimi", "local_cache_hit"] == 2 + 2
    assert found["vllm:prompt_tokens_by_source_total", "0", "kimi", "local_compute"] == 1 + 2
    assert found["moonshard_cached_tokens_total", "0", "kimi", "device"] == 2 + 2
    assert not any("external" in name or "moonshard_tier_" in name for name, *_ in found)  # there are no tiers
    assert found["vllm:request_success_total", "0", "length", "kimi"] == 3
    assert found["vllm:time_to_first_token_seconds_count", "0", "kimi"] == 2
    assert found["vllm:inter_token_latency_seconds_count", "0", "kimi"] == 5 + 2 * 4
    assert found["moonshard_requests_total", "completed"] == 2
    assert found["moonshard_http_requests_total", "/v1/completions", "200"] == 1
    assert found["vllm:kv_cache_usage_perc", "0", "kimi"] == 16 / NUM_BLOCKS


async def test_every_query_of_vllms_board_finds_what_it_selects(http: httpx.AsyncClient):
    assert len(BOARD) == 27
    await http.post("/v1/completions", json=ASKED | {"n": 2})
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    found = [sample for family in families for sample in family.samples if sample.labels.get("model_name") == "kimi"]
    for selected, summed_by in BOARD:
        for name in selected.split(" / "):
            samples = [sample for sample in found if sample.name == name]
            assert samples, name
            assert summed_by is None or all(summed_by in sample.labels for sample in samples), name
    longest = {sample.name: sample.value for sample in found}["vllm:request_max_num_generation_tokens_sum"]
    assert longest == ASKED["max_tokens"]  # of either choice, not of both


async def test_every_metric_says_what_it_is_beyond_its_name(http: httpx.AsyncClient):
    await http.post("/v1/completions", json=ASKED)
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        own_words = set(re.findall(r"\w+", family.documentation.lower())) - set(re.split(r"[:_]", family.name))
        assert len(own_words) > 2, (family.name, family.documentation)
        assert not family.name.endswith("_created")


async def test_the_phases_partition_the_end_to_end_time(http: httpx.AsyncClient, grpc_client: AsyncClient):
    timing = (await grpc_client.generate([1, 2, 3], max_tokens=20)).timing
    assert math.isclose(sum(timing.phases().values()), timing.e2e_ms)
    assert min(timing.phases().values()) >= 0
    assert math.isclose(timing.wire_ms, timing.first_token_ms - timing.worker_queue_ms - timing.worker_prefill_ms)
    assert timing.ttft_ms <= timing.e2e_ms
    found = await samples(http)
    phases = ("gateway_queue", "first_token", "decode", "finish")
    total_s = sum(found["moonshard_request_phase_seconds_sum", "0", "kimi", phase] for phase in phases)
    assert math.isclose(total_s, found["vllm:e2e_request_latency_seconds_sum", "0", "kimi"])


async def test_a_client_cannot_make_up_label_values(http: httpx.AsyncClient):
    await http.get("/made/up")
    found = await samples(http)
    assert found["moonshard_http_requests_total", "other", "404"] == 1
    assert not any("made" in value for key in found for value in key)


async def test_a_worker_that_is_gone_runs_nothing_and_keeps_its_counts(
    http: httpx.AsyncClient, running: RunningGateway, worker: FakeWorker
):
    worker.load.num_waiting, worker.load.num_preemptions = 3, 4
    worker.load.kv_store.CopyFrom(KV_STORE)
    await http.post("/v1/completions", json=ASKED)
    there = await samples(http)
    assert there["vllm:num_requests_running", "0", "kimi"] > 0
    assert there["vllm:kv_cache_usage_perc", "0", "kimi"] > 0
    worker.welcome.protocol_version = PROTOCOL_VERSION + 1  # it does not come back
    worker.drop_link()
    await running.gateway.pool.wait_not_ready()
    gone = await samples(http)
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert [gone[name, "0", "kimi"] for name in gauges] == [0, 0, 0]
    assert gone["vllm:num_preemptions_total", "0", "kimi"] == 4
    address = running.gateway.pool.links[0].address
    assert there["moonshard_tier_held_bytes", "host", address] == 9
    assert there["moonshard_tier_up", "store", address] == 1
    assert not any(name in ("moonshard_tier_held_bytes", "moonshard_tier_up") for name, *_ in gone)
    assert [each["moonshard_tier_queued_blocks", address] for each in (there, gone)] == [11, 0]
    assert [each["moonshard_tier_lacking_blocks", address] for each in (there, gone)] == [14, 0]
    assert gone["moonshard_tier_hits_total", "host", address] == 1
    assert not any(name in ("moonshard_used_blocks", "moonshard_free_blocks") for name, *_ in gone)
