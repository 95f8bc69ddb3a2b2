"""Two gateways over workers that register by themselves, as processes: who comes and goes, is killed, or asks again."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.server.door import Door
from tests.cluster.conftest import running, wait_until
from tests.cluster.faults import SETTINGS as OF_ALL
from tests.cluster.faults import Fleet, Process
from tests.cluster.gateways.registered import Registered, running_registered
from tests.cluster.streams import Ask, Listeners, answer, assert_all_right, assert_right
from tests.dialling import inspect, own_key
from tests.engine_room import long_text
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.registering import registry_over

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]
# Slots for all streams of a test on one worker: two gateways may send more to one than to the other.
SETTINGS = {"model.max_context_tokens": 4000, "kv.num_blocks": 1024, "decode.max_slots": 8}
STEP_S = 0.5  # of this model, on a machine that has other things to do
SERVES_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registered]:
    with running_registered(tmp_path_factory.mktemp("registered"), num_prefill=2, settings=SETTINGS) as cluster:
        yield cluster


def loads(fleet: Fleet) -> list[link_pb2.WorkerLoad]:
    return [inspect(worker.address).load for worker in fleet.workers.values()]


def num_there(fleet: Fleet) -> int:
    """Choices that run or wait, on all workers."""
    return sum(load.num_running + load.num_waiting for load in loads(fleet))


def asks(num_asks: int, max_tokens: int, seed: int) -> list[Ask]:
    return [Ask(prompt=long_text(40, seed=seed + number), max_tokens=max_tokens) for number in range(num_asks)]


def test_both_gateways_serve_over_all_workers(two: Registered):
    for name in two.gateways:
        (ask,) = asks(1, 20, seed=1)
        assert_right(ask, answer(two.seen_by(name), ask))


def test_a_session_of_one_gateway_goes_on_where_it_was_through_the_other(two: Registered):
    """Prompts shorter than a block, of which no worker knows anything: only the session's key can tell."""
    workers = list[tuple[str, str]]()
    for number in range(12):
        body = {"prompt": long_text(8, seed=100 + number), "max_tokens": 2, "temperature": 0}
        found = []
        for name in two.gateways:
            with two.seen_by(name).http() as http:
                asked = http.post("/v1/completions", json=body, headers={"x-session-id": f"session {number}"})
            assert asked.headers["x-moonshard-affinity"] == "miss"
            found.append(asked.headers["x-moonshard-worker"])
        workers.append((found[0], found[1]))
    assert len({first for first, _ in workers}) == 2
    assert sum(first == second for first, second in workers) >= 10  # bounds are of what each gateway knows itself


@pytest.mark.parametrize("num_kept", [0, 3])
def test_a_killed_gateway_takes_nothing_with_it_but_its_own_requests(two: Registered, num_kept: int):
    """What it asked for is freed within a second and a step, and the other gateway's streams go on, exactly."""
    killed, other = two.seen_by("gateway 0"), two.seen_by("gateway 1")
    lost = Listeners(killed, asks(5, 1500, seed=20))
    kept = Listeners(other, asks(num_kept, 1500, seed=10), num_clients=max(1, num_kept))
    try:
        # Decoding, all of them: what is on its way into a slab rests in quarantine after its writer is gone.
        assert wait_until(lambda: all(len(heard.tokens) > 2 for heard in (*kept.heard, *lost.heard)), 120), two.logs()
        assert num_there(other) == num_kept + 5
        killed_s = time.monotonic()
        killed.gateway.kill()
        is_free = (lambda: num_there(other) == num_kept) if num_kept else (lambda: not other.remains())
        assert wait_until(is_free, 30), other.remains()
        assert time.monotonic() - killed_s < 1.0 + STEP_S
        assert kept.are_done == (num_kept == 0)  # they were there all the while
        assert_all_right(kept.asked, kept.wait())
        assert all(heard.failure for heard in lost.wait())
        other.assert_as_it_began()
    finally:
        two.start_gateway("gateway 0")
        two.wait_linked()


def test_what_a_killed_gateway_had_begun_is_told_from_its_start_by_another(two: Registered):
    """The client knows some tokens already, and hears the same again, without a seed. The prompt is in the cache."""
    body = {"prompt": long_text(640, seed=60), "temperature": 0.9, "max_tokens": 600, "ignore_eos": True}
    heard = list[int]()
    try:
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            for choice in streamed(two.seen_by("gateway 0"), body, key="again"):
                heard += choice["token_ids"]
                if len(heard) > 20:
                    two.gateways["gateway 0"].kill()
        assert 20 < len(heard) < 600
        with two.seen_by("gateway 1").http() as http:
            asked = body | {"return_token_ids": True}
            again = http.post("/v1/completions", json=asked, headers={"idempotency-key": "again"}).json()
        assert again["choices"][0]["token_ids"][: len(heard)] == heard
        assert len(again["choices"][0]["token_ids"]) == 600
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 600
    finally:
        two.start_gateway("gateway 0")
        two.wait_linked()


def test_a_worker_that_comes_serves_within_a_second_and_one_that_goes_is_gone(two: Registered):
    worker = two.start_worker("decode 9", "decode")
    worker.wait_for("moonshard ready")
    ready_s = time.monotonic()
    for name in two.gateways:
        assert wait_until(lambda name=name: two.is_linked(name), 30), two.logs()
    assert time.monotonic() - ready_s < SERVES_WITHIN_S + STEP_S
    fleet, address = two.seen_by("gateway 0"), worker.address
    under_way = Listeners(fleet, asks(6, 300, seed=30))
    assert wait_until(lambda: all(heard.tokens for heard in under_way.heard), 60)
    assert two.end_worker("decode 9") == 0
    assert_all_right(under_way.asked, under_way.wait())
    for name in two.gateways:
        assert wait_until(lambda name=name: two.is_linked(name), SERVES_WITHIN_S + STEP_S), two.logs()
        with two.seen_by(name).http() as http:
            assert f'worker="{address}"' not in http.get("/metrics").text


def test_a_killed_worker_is_forgotten_with_its_lease_and_one_at_its_address_serves_at_once(two: Registered):
    worker = two.workers["decode 1"]
    worker.kill()
    assert wait_until(lambda: not two.is_linked("gateway 0"), 10)
    worker.restart()
    ready_s = time.monotonic()
    two.wait_linked()
    assert time.monotonic() - ready_s < SERVES_WITHIN_S + STEP_S
    two.end_worker("decode 1")
    gone = two.start_worker("decode 1", "decode")
    gone.wait_for("moonshard ready")
    two.wait_linked()
    gone.kill()
    del two.workers["decode 1"]
    two.wait_linked()  # a lease later
    two.start_worker("decode 1", "decode")
    two.wait_linked()


def streamed(fleet: Fleet, body: dict[str, object], *, key: str | None) -> Iterator[dict[str, Any]]:
    """All choices of all events of a stream over HTTP, with their tokens' ids."""
    headers = {} if key is None else {"idempotency-key": key}
    asked = body | {"stream": True, "return_token_ids": True}
    with fleet.http() as http, http.stream("POST", "/v1/completions", json=asked, headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield from json.loads(line[6:])["choices"]


def tokens_asked_again(two: Registered, key: str | None, *, over: str, gateway: str) -> list[list[int]]:
    """All choices' tokens of one request at a temperature, without a seed."""
    fleet, prompt = two.seen_by(gateway), long_text(40, seed=50)
    if over == "grpc":
        metadata = () if key is None else (("x-request-id", key),)
        with fleet.client() as client:
            told = client.generate(prompt, metadata=metadata, n=3, temperature=0.9, max_tokens=24, ignore_eos=True)
        return [list(choice.token_ids) for choice in told.choices]
    tokens: list[list[int]] = [[], [], []]
    body = {"prompt": prompt, "n": 3, "temperature": 0.9, "max_tokens": 24, "ignore_eos": True}
    for choice in streamed(fleet, body, key=key):
        tokens[choice["index"]] += choice["token_ids"]
    return tokens


@pytest.mark.parametrize("over", ["http", "grpc"])
def test_a_request_asked_again_of_another_gateway_is_answered_with_the_same_tokens(two: Registered, over: str):
    first = tokens_asked_again(two, "again", over=over, gateway="gateway 0")
    assert [len(tokens) for tokens in first] == [24, 24, 24]
    assert len({tuple(tokens) for tokens in first}) == 3
    assert tokens_asked_again(two, "again", over=over, gateway="gateway 1") == first
    assert tokens_asked_again(two, "other", over=over, gateway="gateway 1") != first
    unnamed = [tokens_asked_again(two, None, over=over, gateway=name) for name in two.gateways]
    assert unnamed[0] != unnamed[1]


async def test_a_worker_whose_address_another_process_has_names_it_and_ends_with_2(tmp_path: Path):
    """The other one listens no more, so that the port is free, and is still linked."""
    other = FakeWorker(role="decode")
    async with registry_over() as (pool, registry), asyncio.TaskGroup() as closing:
        server = grpc.aio.server(
            options=(("grpc.so_reuseport", 0),), interceptors=(Door(own_key().proofs, lambda: port),)
        )
        link_pb2_grpc.add_WorkerServicer_to_server(other, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pool.call(f"127.0.0.1:{port}")
        await pool.wait_changed(10)
        closing.create_task(server.stop(120))
        settings = {**OF_ALL, "decode.port": port, "worker.gateways": f'["{registry}"]'}
        worker = Process("decode 0", "decode", settings, tmp_path / "decode.log")
        worker.start()
        try:
            code = await asyncio.to_thread(worker.running.wait, 120)
        finally:
            worker.running.kill()
            other.drop_link()
    assert code == 2, worker.log()
    assert f"worker.host: gateway {registry}: another process answers at 127.0.0.1:{port}" in worker.log()


def test_workers_of_serve_register_with_its_gateway():
    with running(**{"gateway.registry": "grpc", "gateway.registry_port": 0}) as cluster:
        with cluster.client() as client:
            assert len(client.generate(long_text(40, seed=1), max_tokens=8, ignore_eos=True).choices[0].token_ids) == 8
        assert cluster.metric("moonshard_worker_up") == 2
