"""How KV moves between real processes: what each side counted, the other transport, and prompts that do not move."""

import zlib
from collections.abc import Iterator

import pytest

from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.cluster.conftest import BLOCK_BYTES, Cluster, running, wait_until
from tests.cluster.handoffs.test_cluster_pd_tokens import IDLE_WITHIN_S, KINDS, NUM_TOKENS, generate
from tests.engine_room import long_text
from tests.sizes import BLOCK_SIZE

pytestmark = pytest.mark.xdist_group("cluster")
LOCAL_TOKENS = 64


def test_what_one_worker_published_is_what_the_other_landed_to_the_byte(cluster):
    lengths = [15, 16, 17, 300, 1500]
    before = transfers(cluster)
    for length in lengths:
        generate(cluster, unknown(length, "landed"), temperature=0.0, max_tokens=2)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
    assert wait_until(cluster.is_as_it_began, IDLE_WITHIN_S)
    now = transfers(cluster)
    assert {name: now[name] - before[name] for name in now} == {
        "published_bytes": num_blocks * BLOCK_BYTES,
        "landed_bytes": num_blocks * BLOCK_BYTES,
        "landed_blocks": num_blocks,
        "mismatches": 0,
        "failures": 0,
        "handoffs": len(lengths),
        "local_prefills": 0,
        "retries": 0,
    }


def test_nothing_compiles_on_either_worker_once_it_serves(cluster):
    generate(cluster, long_text(130), temperature=1.0, n=2, logprobs=1, max_tokens=5)
    for worker in cluster.workers:
        load = cluster.inspect(*worker).load
        assert load.num_compilations > 0
        assert load.num_compilations_while_serving == 0


def unknown(length: int, test: str) -> list[int]:
    """A prompt that no other test asks: what a worker has cached is not transferred."""
    return long_text(length, seed=zlib.crc32(f"{test} {length}".encode()))


def transfers(cluster: Cluster) -> dict[str, float]:
    """What each side counted of the KV that was transferred."""
    sent = cluster.inspect("prefill").load.kv_transfer
    taken = cluster.inspect("decode").load.kv_transfer
    return {
        "published_bytes": sent.published_bytes,
        "landed_bytes": taken.landed_bytes,
        "landed_blocks": taken.num_landed_blocks,
        "mismatches": taken.num_checksum_mismatches,
        "failures": sum(sent.num_failures.values()),
        "handoffs": counted(cluster, "moonshard_request_handoffs_total"),
        "local_prefills": counted(cluster, "moonshard_local_prefills_total"),
        "retries": counted(cluster, "moonshard_request_retries_total"),
    }


def counted(cluster: Cluster, name: str) -> float:
    """The sum of a gateway's counter over its labels; 0 while nothing was counted."""
    with cluster.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


@pytest.fixture(scope="module")
def streaming() -> Iterator[Cluster]:
    """KV over a gRPC stream; short prompts are not handed over."""
    with running(**{"kv.transport": "grpc", "routing.local_prefill_max_tokens": LOCAL_TOKENS}) as started:
        yield started


@pytest.mark.parametrize("kind", ["greedy", "all"])
def test_kv_over_a_grpc_stream_gives_the_same_tokens(streaming, kind):
    before = transfers(streaming)
    lengths = [65, 300, 1500]
    for length in lengths:
        prompt = unknown(length, kind)
        tokens = generate(streaming, prompt, **KINDS[kind]).choices[0].token_ids
        assert len(tokens) == NUM_TOKENS
        assert not assert_drawn_from(reference(), prompt, tokens, Sampling(**KINDS[kind]))
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
    now = transfers(streaming)
    assert now["landed_blocks"] - before["landed_blocks"] == num_blocks
    assert now["published_bytes"] - before["published_bytes"] == num_blocks * BLOCK_BYTES
    assert (now["mismatches"], now["failures"], now["retries"]) == (0, 0, 0)
    assert wait_until(streaming.is_as_it_began, IDLE_WITHIN_S)


def test_short_prompts_are_prefilled_where_they_are_decoded_and_long_ones_handed_over(streaming):
    before = transfers(streaming)
    lengths = [1, 63, LOCAL_TOKENS, LOCAL_TOKENS + 1, 100]
    own_tokens = {role: streaming.inspect(role).load.prefill_tokens for role in ("prefill", "decode")}
    for length in lengths:
        prompt = unknown(length, "local")
        tokens = generate(streaming, prompt, temperature=0.0).choices[0].token_ids
        assert not assert_drawn_from(reference(), prompt, tokens, Sampling(temperature=0.0))
    now = transfers(streaming)
    assert now["local_prefills"] - before["local_prefills"] == 3
    assert now["handoffs"] - before["handoffs"] == 2
    for role, expected in (("prefill", lengths[3:]), ("decode", lengths[:3])):
        assert streaming.inspect(role).load.prefill_tokens - own_tokens[role] == sum(expected)
