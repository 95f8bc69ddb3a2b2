"""Clients that leave, workers that die, requests that do not fit: nothing is lost and nobody hangs."""

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from moonshard.rpc.status import Overloaded, RequestError, Unavailable
from tests.cluster.conftest import AGGREGATED, QUARANTINE_S, start_cluster, stop_cluster, wait_until
from tests.engine_room import long_text

pytestmark = pytest.mark.xdist_group("cluster")
FREED_WITHIN_S = 1.5 + QUARANTINE_S  # one second, a step, and the look; then slots that a writer may still touch


@pytest.mark.parametrize("num_tokens_read", [0, 1, 10])
def test_a_grpc_client_that_leaves_frees_its_slot_and_blocks(cluster, num_tokens_read):
    with cluster.client() as client:
        stream = client.stream(long_text(1200), max_tokens=700, ignore_eos=True)
        for _ in range(num_tokens_read):
            next(iter(stream))
        if not num_tokens_read:
            assert wait_until(lambda: not cluster.is_as_it_began(), 5)
        stream.cancel()
        assert wait_until(cluster.is_as_it_began, FREED_WITHIN_S)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_http_client_that_leaves_frees_its_slot_and_blocks(cluster, is_streamed):
    body = {"prompt": long_text(1200), "max_tokens": 700, "ignore_eos": True, "stream": is_streamed}
    with cluster.http() as http, contextlib.suppress(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.2)
    assert wait_until(cluster.is_as_it_began, FREED_WITHIN_S)


def test_a_request_that_could_never_fit_is_refused_by_name(cluster):
    with cluster.http() as http:
        answer = http.post("/v1/completions", json={"prompt": long_text(1500), "max_tokens": 600})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


def test_a_killed_worker_ends_its_streams_with_503_and_is_replaced():
    cluster = start_cluster(**AGGREGATED)
    try:
        _kill_mid_stream(cluster)
    finally:
        assert stop_cluster(cluster) == 0


def _kill_mid_stream(cluster) -> None:
    with cluster.client() as client:
        stream = client.stream(long_text(50), max_tokens=1900, ignore_eos=True)
        next(iter(stream))
        os.kill(cluster.pid("worker"), signal.SIGKILL)
        with pytest.raises(Unavailable) as caught:
            for _ in stream:
                pass
        assert caught.value.retry_after_s
        assert wait_until(lambda: _serves(client), 60)
        assert wait_until(cluster.is_as_it_began, FREED_WITHIN_S)


def _serves(client) -> bool:
    with contextlib.suppress(RequestError):
        return len(client.generate([1, 2, 3], max_tokens=2, ignore_eos=True).choices[0].token_ids) == 2
    return False


def test_what_does_not_fit_now_waits_and_then_gets_429_with_retry_after():
    cluster = start_cluster(**{"gateway.queue_timeout_s": 0.05, "decode.max_slots": 1})
    try:
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda _: _answer(cluster), range(6)))
    finally:
        assert stop_cluster(cluster) == 0
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert refused
    assert len(refused) < 6
    assert all(error.retry_after_s for error in refused)


def _answer(cluster):
    with cluster.client() as client:
        try:
            return client.generate(long_text(100), max_tokens=1500, ignore_eos=True)
        except Overloaded as error:
            return error


def test_a_second_server_on_the_same_port_is_refused_before_anything_loads(cluster):
    port = cluster.http_url.rpartition(":")[2]
    argv = [sys.executable, "-m", "moonshard.serving.cli", "serve", "--set", f"gateway.port={port}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "gateway.port" in done.stderr
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_lets_a_running_stream_finish_and_exits_with_0():
    cluster = start_cluster()
    with cluster.client() as client:
        stream = client.stream(long_text(50), max_tokens=600, ignore_eos=True)
        next(iter(stream))
        with ThreadPoolExecutor(1) as thread:
            code = thread.submit(stop_cluster, cluster)
            tokens = [token for delta in stream for token in delta.token_ids]
            assert len(tokens) >= 598
            assert stream.summary.usage.completion_tokens == 600
            assert code.result() == 0
