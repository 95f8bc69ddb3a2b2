"""Clients that leave, workers that die, requests that do not fit: nothing is lost and nobody hangs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from moonshard.rpc.status import Overloaded
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import Reference, assert_drawn_from, reference
from tests.cluster.conftest import AGGREGATED, QUARANTINE_S, Cluster, start_cluster, stop_cluster, wait_until
from tests.engine_room import long_text

pytestmark = pytest.mark.xdist_group("cluster")
FREED_WITHIN_S = 1.5 + QUARANTINE_S  # one second, a step, and the look; then slots that a writer may still touch
ONE_SLOT = {
    "prefill.max_slots": 1,
    "decode.max_slots": 1,
    "model.max_context_tokens": 8000,
    "kv.num_blocks": 512,
    "prefill.chunk_tokens": 32,  # one size of either step: little to compile
}
HOLDS_THE_SLOT = {"max_tokens": 7800, "ignore_eos": True}  # for seconds, until its client leaves
QUEUE_TIMEOUT_S = 0.3


@pytest.mark.parametrize("num_tokens_read", [0, 1, 10])
def test_a_grpc_client_that_leaves_frees_its_slot_and_blocks(cluster, num_tokens_read):
    num_before = _num_ended(cluster, "cancelled")
    with cluster.client() as client:
        stream = client.stream(long_text(1200), max_tokens=700, ignore_eos=True)
        for _ in range(num_tokens_read):
            next(iter(stream))
        if not num_tokens_read:
            assert wait_until(lambda: not cluster.is_as_it_began(), 5)
        stream.cancel()
        assert wait_until(cluster.is_as_it_began, FREED_WITHIN_S)
    assert _num_ended(cluster, "cancelled") == num_before + 1, "it had ended before its client left"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_http_client_that_leaves_frees_its_slot_and_blocks(cluster, is_streamed):
    num_before = _num_ended(cluster, "cancelled")
    body = {"prompt": long_text(1200), "max_tokens": 700, "ignore_eos": True, "stream": is_streamed}
    connection = HTTPConnection(cluster.http_url.rpartition("/")[2])
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    assert wait_until(lambda: cluster.inspect().load.num_running == 1, 30)
    connection.close()
    assert wait_until(cluster.is_as_it_began, FREED_WITHIN_S)
    assert _num_ended(cluster, "cancelled") == num_before + 1, "it had ended before its client left"


def _num_ended(cluster, outcome: str) -> float:
    """How many requests ended in this way, as the gateway counts."""
    with cluster.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if f'moonshard_requests_total{{outcome="{outcome}"' in line
    )


def test_a_request_that_could_never_fit_is_refused_by_name(cluster):
    with cluster.http() as http:
        answer = http.post("/v1/completions", json={"prompt": long_text(1500), "max_tokens": 600})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


def test_a_killed_worker_is_replaced_and_those_who_wait_for_it_go_on_where_they_were():
    """There is no other; `test_gateway_failover` has what becomes of those who wait in vain."""
    cluster = start_cluster(**AGGREGATED, **{"routing.failover_wait_s": 60.0})
    try:
        kill_mid_stream(cluster, reference())
    finally:
        assert stop_cluster(cluster) == 0


def kill_mid_stream(cluster: Cluster, of: Reference) -> None:
    """Kills the only worker of an aggregated server while it answers; the answer goes on as `of` has it."""
    pid = cluster.pid("worker")  # before: the stream does not wait for the look
    prompt, tokens = long_text(50), list[int]()
    with cluster.client() as client:
        stream = client.stream(prompt, max_tokens=400, temperature=0, ignore_eos=True)
        for delta in stream:
            if not tokens:
                os.kill(pid, signal.SIGKILL)
            tokens += delta.token_ids
        assert stream.summary.timing.num_retries == 1
        assert len(tokens) == 400
        assert_drawn_from(of, prompt, tokens, Sampling(temperature=0.0))
        assert wait_until(cluster.is_as_it_began, FREED_WITHIN_S)
        assert _is_served(client)


def _is_served(client) -> bool:
    return len(client.generate([1, 2, 3], max_tokens=2, ignore_eos=True).choices[0].token_ids) == 2


@pytest.fixture(scope="module")
def one_slot() -> Iterator[Cluster]:
    started = start_cluster(**ONE_SLOT, **{"gateway.queue_timeout_s": QUEUE_TIMEOUT_S})
    yield started
    if started.process.returncode is None:  # the last test ends it
        stop_cluster(started)


def test_what_does_not_fit_now_waits_and_then_gets_429_with_retry_after(one_slot):
    with one_slot.client() as client, client.stream(long_text(100), **HOLDS_THE_SLOT) as running:
        next(running)
        next(running)  # the second token is the decode worker's own: the slot is taken
        with client.stream(long_text(100), **HOLDS_THE_SLOT) as ahead:
            next(ahead)  # one is prefilled ahead of its slot, and waits
            for refusal in (_refusal_over_grpc, _refusal_over_http):
                asked_s = time.monotonic()
                assert refusal(one_slot) > 0
                assert time.monotonic() - asked_s >= QUEUE_TIMEOUT_S
            assert not _num_ended(one_slot, "completed"), "the slot was not held all the time"
    assert wait_until(one_slot.is_as_it_began, FREED_WITHIN_S)
    with one_slot.client() as client:
        assert _is_served(client)


def _refusal_over_grpc(cluster) -> float:
    """The refusal's delay: after how many seconds its client should try again."""
    with cluster.client() as client, pytest.raises(Overloaded) as caught:
        client.generate(long_text(100), max_tokens=5)
    return caught.value.retry_after_s or 0.0


def _refusal_over_http(cluster) -> float:
    with cluster.http() as http:
        answer = http.post("/v1/completions", json={"prompt": long_text(100), "max_tokens": 5})
    assert answer.status_code == 429
    return float(answer.headers["retry-after"])


def test_a_second_server_on_the_same_port_is_refused_before_anything_loads(cluster):
    port = cluster.http_url.rpartition(":")[2]
    argv = [sys.executable, "-m", "moonshard.serving.cli", "serve", "--set", f"gateway.port={port}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "gateway.port" in done.stderr
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_lets_a_running_stream_finish_and_exits_with_0(one_slot):
    """The last test here: it ends the servers."""
    with one_slot.client() as client:
        stream = client.stream(long_text(50), max_tokens=600, ignore_eos=True)
        next(iter(stream))
        with ThreadPoolExecutor(1) as thread:
            code = thread.submit(stop_cluster, one_slot)
            tokens = [token for delta in stream for token in delta.token_ids]
            assert len(tokens) >= 598
            assert stream.summary.usage.completion_tokens == 600
            assert code.result() == 0
