"""Hundreds of requests of every kind at once, some of which are given up: the rest get the reference's tokens."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from moonshard.serving.request import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.cluster.conftest import QUARANTINE_S, wait_until
from tests.engine_room import long_text

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(900)]
NUM_REQUESTS = 400
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
    asked = [draw(number) for number in range(NUM_REQUESTS)]

    def ask(each: Asked) -> list[int]:
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

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = list(clients.map(ask, asked))
    cut_short = 0
    for each, tokens in zip(asked, answers, strict=True):
        assert each.num_read is not None or len(tokens) == each.max_tokens
        cut_short += assert_drawn_from(reference(), each.prompt, tokens, each.sampling)
    assert cut_short <= CUT_SHARE * NUM_REQUESTS
    assert wait_until(cluster.is_as_it_began, timeout_s=1.5 + QUARANTINE_S)
    for worker in cluster.workers:
        assert cluster.inspect(*worker).load.num_compilations_while_serving == 0
    assert cluster.inspect("prefill").load.kv_transfer.published_bytes > 0
    assert cluster.inspect("decode").load.kv_transfer.num_checksum_mismatches == 0
