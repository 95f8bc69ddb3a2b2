"""Two gateways over the same workers: what one asks of them the other knows, from what the workers tell both.

In processes, which take as long to start as a tenth of all cluster tests; what a gateway makes of what it is told is
held by `gateway/test_knowledge`, and what a worker tells by `test_prefix_feed`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import httpx
import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.faults import Fleet, running_fleet
from tests.sizes import BLOCK_SIZE

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600), pytest.mark.slow]
VOCAB_SIZE = 1000
NUM_KNOWN = 20 * BLOCK_SIZE
NUM_ASKED = 6
SETTINGS = {
    "routing.local_prefill_max_tokens": 2000,  # so that one worker has all of a request
    "model.max_context_tokens": 8000,  # a stream that goes on for longer than all that is asked beside it
    "kv.num_blocks": 1024,
    "prefill.max_slots": 2,
    "decode.max_slots": 2,  # these: few programs to compile
    "prefill.chunk_tokens": 32,
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Fleet]]:
    """The same workers, seen through either gateway."""
    folder = tmp_path_factory.mktemp("fleet")
    with running_fleet(folder, num_decode=2, settings=SETTINGS) as one:
        ports = {"gateway.port": 0, "gateway.grpc_port": 0}
        gateway = replace(
            one.gateway, popen=None, log_path=folder / "other.log", settings={**one.gateway.settings, **ports}
        )
        gateway.start()
        try:
            gateway.wait_for("moonshard ready")
            other = replace(one, gateway=gateway)
            assert wait_until(lambda: other.metric("moonshard_worker_up") == len(one.workers), 30), other.logs()
            yield one, other
        finally:
            gateway.kill()


def body(prompt: list[int], max_tokens: int, *, stream: bool) -> Mapping[str, object]:
    greedy = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": "kimi_k2", "prompt": prompt, "stream": stream} | greedy


def ask(fleet: Fleet, prompt: list[int]) -> tuple[str, int]:
    """The worker that served it, and how much of the prompt it had cached."""
    with fleet.http() as http:
        answer = http.post("/v1/completions", json=body(prompt, 2, stream=False)).raise_for_status()
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-moonshard-worker"], cached


@contextmanager
def streaming(fleet: Fleet, prompt: list[int], max_tokens: int) -> Iterator[httpx.Response]:
    """A stream whose first token has arrived."""
    with (
        fleet.http() as http,
        http.stream("POST", "/v1/completions", json=body(prompt, max_tokens, stream=True)) as got,
    ):
        lines = got.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        yield got


def prompts(seed: int, num_tokens: int) -> Iterator[list[int]]:
    random = Random(seed)
    while True:
        yield [random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def test_what_one_gateway_has_asked_the_other_finds_again_where_it_is(two: tuple[Fleet, Fleet]):
    one, other = two
    known, workers = prompts(1, NUM_KNOWN), list[str]()
    for _ in range(NUM_ASKED):
        before, prompt = other.metric("moonshard_known_blocks"), next(known)
        worker, cached = ask(one, prompt)
        assert cached == 0
        assert wait_until(
            lambda before=before: other.metric("moonshard_known_blocks") >= before + NUM_KNOWN // BLOCK_SIZE, 30
        ), other.logs()
        assert ask(other, prompt) == (worker, NUM_KNOWN - 1)
        workers.append(worker)
    assert len(set(workers)) == 2  # else there was nothing to know


def test_what_one_gateway_keeps_a_worker_busy_with_the_other_sees(two: tuple[Fleet, Fleet]):
    one, other = two
    long, short = prompts(2, 1500), prompts(3, BLOCK_SIZE)
    with streaming(one, next(long), 6000) as stream:
        busy = stream.headers["x-moonshard-worker"]
        assert wait_until(lambda: other.metric("moonshard_active_tokens", worker=busy) > 1500, 30), other.logs()
        found = {ask(other, next(short))[0] for _ in range(NUM_ASKED)}
        assert other.metric("moonshard_active_tokens", worker=busy) > 1500  # it was, all the while
    assert len(found) == 1
    assert busy not in found
    assert wait_until(lambda: not one.remains(), 30), one.remains()
