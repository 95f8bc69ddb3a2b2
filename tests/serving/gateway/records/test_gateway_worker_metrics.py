"""What /metrics reports about workers that only prefill or only decode."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.process import serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.records.test_gateway_metrics import KV_STORE

type Samples = dict[tuple[str, ...], float]

KV = link_pb2.KvTransfer(
    num_handoffs=1,
    published_bytes=2,
    num_transfers=3,
    publish_s=4.5,
    num_failures={"timeout": 5},
    landed_bytes=6,
    num_landed_blocks=7,
    num_checksum_mismatches=8,
    free_slab_slots=9,
    used_slab_slots=10,
    leased_slab_slots=11,
    quarantined_slab_slots=12,
    total_slab_slots=42,
)


@pytest.fixture
async def samples(gateway_config: GatewayConfig, kimi_folder) -> tuple[Samples, str, str]:
    """By name and label values in the order of label names; of a prefill and a decode worker, then their addresses."""
    prefill, decode = FakeWorker(role="prefill", epoch=b"p" * 16), FakeWorker(role="decode", epoch=b"d" * 16)
    for worker in (prefill, decode):
        worker.load.kv_transfer.CopyFrom(KV)
    decode.load.kv_store.CopyFrom(KV_STORE)
    async with fake_worker.serving(prefill) as prefill_port, fake_worker.serving(decode) as decode_port:
        addresses = f"127.0.0.1:{prefill_port}", f"127.0.0.1:{decode_port}"
        config = make_config(gateway_config, kimi_folder, list(addresses))
        async with serving(config) as running, httpx.AsyncClient(base_url=running.http, trust_env=False) as http:
            for link in running.gateway.pool.links:
                while not link.last_load.HasField("kv_transfer"):
                    await running.gateway.pool.wait_changed(0.05)
            text = (await http.get("/metrics")).text
    found = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return found, *addresses


async def test_the_kv_plane_of_each_worker_is_told(samples: tuple[Samples, str, str]):
    found, _, decode = samples
    assert {key[0]: value for key, value in found.items() if key[1:] == (decode,) and "kv_" in key[0]} == {
        "moonshard_kv_published_bytes_total": 2,
        "moonshard_kv_transfers_total": 3,
        "moonshard_kv_publish_seconds_total": 4.5,
        "moonshard_kv_landed_bytes_total": 6,
        "moonshard_kv_landed_blocks_total": 7,
        "moonshard_kv_checksum_mismatches_total": 8,
    }
    assert found["moonshard_kv_transfer_failures_total", "timeout", decode] == 5
    assert found["moonshard_handoffs", decode] == 1
    states = {key[1]: value for key, value in found.items() if key[0] == "moonshard_slab_slots" and key[2] == decode}
    assert states == {"free": 9, "used": 10, "leased": 11, "quarantined": 12}


async def test_each_tier_of_a_worker_that_has_some_is_told(samples: tuple[Samples, str, str]):
    found, prefill, decode = samples
    of_tiers = {
        (name.removeprefix("moonshard_tier_"), *labels): value
        for (name, *labels), value in found.items()
        if name.startswith("moonshard_tier_")
    }
    assert not any(prefill in labels for labels in of_tiers)
    assert {key: value for key, value in of_tiers.items() if "ssd" not in key and "store" not in key} == {
        ("hits_total", "host", decode): 1,
        ("misses_total", "absent", "host", decode): 2,
        ("misses_total", "timed_out", "host", decode): 3,
        ("kept_blocks_total", "host", decode): 4,
        ("not_kept_blocks_total", "host", decode): 5,
        ("evicted_blocks_total", "host", decode): 6,
        ("read_bytes_total", "host", decode): 7,
        ("written_bytes_total", "host", decode): 8,
        ("held_bytes", "host", decode): 9,
        ("late_fetches_total", decode): 10,
        ("queued_blocks", decode): 11,
        ("dropped_blocks_total", decode): 12,
        ("lost_blocks_total", decode): 13,
        ("lacking_blocks", decode): 14,
    }
    assert (of_tiers["hits_total", "ssd", decode], of_tiers["held_bytes", "ssd", decode]) == (20, 21)


async def test_of_a_tier_only_what_its_worker_knows_is_told(samples: tuple[Samples, str, str]):
    found, _, decode = samples
    assert {key[1:]: value for key, value in found.items() if key[0] == "moonshard_tier_up"} == {("store", decode): 1}
    assert ("moonshard_tier_held_bytes", "store", decode) not in found
    assert found["moonshard_tier_hits_total", "store", decode] == 22


async def test_only_workers_that_decode_are_engines_to_vllms_boards(samples: tuple[Samples, str, str]):
    found, prefill, decode = samples
    assert found["moonshard_worker_info", "prefill", prefill] == 1
    assert found["moonshard_worker_info", "decode", decode] == 1
    assert found["moonshard_worker_kernels", "avx2", decode] == 1
    assert {key[1] for key in found if key[0] == "vllm:num_requests_running"} == {"1"}
