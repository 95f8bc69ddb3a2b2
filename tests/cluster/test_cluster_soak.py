"""Hundreds of requests of every kind at once, some of which are given up: the rest get the reference's tokens."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.cluster.conftest import QUARANTINE_S, Cluster, start_cluster, stop_cluster, wait_until
from tests.engine_room import long_text

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(900)]
NUM_REQUESTS = 400
NUM_SHARED_REQUESTS = 200
NUM_CLIENTS = 12
CUT_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    num_read: int | None  # tokens after which the client leaves


def draw(number: int) -> Asked:
    rng = random.Random(number)
    return Asked(
        prompt=long_text(rng.choice([1, 15, 16, 17, 63, 64, 65, rng.randint(1, 300)]), seed=number),
        sampling=Sampling(temperature=rng.choice([0.0, 0.7, 1.0]), seed=rng.getrandbits(64)),
        max_tokens=rng.randint(1, 100),
        num_read=rng.choice([None, None, None, 0, 1, 7]),
    )


def test_a_soak_of_mixed_requests_loses_nothing_and_gives_the_reference_tokens(cluster):
    soak(cluster, NUM_REQUESTS)


def test_two_prefill_and_two_decode_workers_share_the_requests_and_give_the_reference_tokens():
    fleet = start_cluster(**{"prefill.replicas": 2, "decode.replicas": 2})
    try:
        soak(fleet, NUM_SHARED_REQUESTS)
        kv = {worker: fleet.inspect(*worker).load.kv_transfer for worker in fleet.workers}
        assert set(kv) == {("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)}
        for (role, _), counted in kv.items():
            assert (counted.published_bytes if role == "prefill" else counted.landed_bytes) > 0
    finally:
        assert stop_cluster(fleet) == 0


def soak(cluster: Cluster, num_requests: int) -> None:
    asked = [draw(number) for number in range(num_requests)]
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = list(clients.map(lambda each: ask(cluster, each), asked))
    cut_short = 0
    for each, tokens in zip(asked, answers, strict=True):
        assert each.num_read is not None or len(tokens) == each.max_tokens
        cut_short += assert_drawn_from(reference(), each.prompt, tokens, each.sampling)
    assert cut_short <= CUT_SHARE * num_requests
    assert wait_until(cluster.is_as_it_began, timeout_s=1.5 + QUARANTINE_S)
    loads = {worker: cluster.inspect(*worker).load for worker in cluster.workers}
    assert all(load.num_compilations_while_serving == 0 for load in loads.values())
    assert all(load.kv_transfer.num_checksum_mismatches == 0 for load in loads.values())
    assert any(load.kv_transfer.landed_bytes for load in loads.values())


def ask(cluster: Cluster, each: Asked) -> list[int]:
    """The tokens that arrived before the client left, or all of them."""
    options = {"temperature": each.sampling.temperature, "seed": each.sampling.seed, "top_p": 1.0}
    with (
        cluster.client() as client,
        client.stream(each.prompt, max_tokens=each.max_tokens, ignore_eos=True, **options) as stream,
    ):
        tokens: list[int] = []
        for delta in stream:
            tokens += delta.token_ids
            if each.num_read is not None and len(tokens) >= each.num_read:
                break
        return tokens
