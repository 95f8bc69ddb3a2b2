"""Links to workers that leave, come back, do not fit the others or are full."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.status import Unavailable
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.sse import decoded
from tests.serving.gateway.workers.fleet import until

ASKED = {"model": "kimi", "prompt": [1, 2], "max_tokens": 4}
LINKS_LOGGER = "moonshard.serving.gateway.workers.link"


@asynccontextmanager
async def gateway_over(config: GatewayConfig, path, *workers: FakeWorker):
    """A gateway over several workers."""
    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(fake_worker.serving(worker)) for worker in workers]
        made = make_config(config, path, [f"127.0.0.1:{port}" for port in ports])
        running = await stack.enter_async_context(serving(made))
        await running.gateway.pool.wait_ready()
        yield running


async def test_losing_a_worker_ends_its_requests_as_unavailable(
    http: httpx.AsyncClient, grpc_client: AsyncClient, worker: FakeWorker
):
    worker.script.may_step.clear()
    whole = asyncio.create_task(http.post("/v1/completions", json=ASKED))
    call = asyncio.create_task(grpc_client.generate([1, 2]))
    await worker.seen(2)
    worker.die()
    answer = await whole
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    with pytest.raises(Unavailable) as caught:
        await call
    assert caught.value.retry_after_s == 2


async def test_losing_a_worker_in_a_stream_is_an_error_event(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.max_tokens_sent = 2
    async with http.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as response:
        blocks = response.aiter_text()
        text = await anext(blocks)
        worker.die()
        text += "".join([block async for block in blocks])
    events = decoded(text.split("\n\n")[:-1])
    assert events[-1]["error"]["code"] == "service_unavailable"
    assert "[DONE]" not in text


async def test_a_worker_that_comes_back_is_used_again_and_its_restart_counted(
    http: httpx.AsyncClient, running: RunningGateway, worker: FakeWorker
):
    pool = running.gateway.pool
    worker.welcome.epoch = b"n" * 16
    worker.drop_link()
    await asyncio.wait_for(pool.wait_not_ready(), 5)
    await asyncio.wait_for(pool.wait_ready(), 5)
    assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
    assert worker.num_links == 2
    assert pool.links[0].num_restarts == 1


async def test_the_log_says_that_a_worker_went_and_that_it_came_back(
    running: RunningGateway, worker: FakeWorker, caplog: pytest.LogCaptureFixture
):
    pool = running.gateway.pool
    worker.drop_link()
    await asyncio.wait_for(pool.wait_not_ready(), 5)
    await asyncio.wait_for(pool.wait_ready(), 5)
    assert [record.message.partition(": ")[2] for record in caplog.records][1:] == ["connected again"]


class Stranger(link_pb2_grpc.WorkerServicer):
    """It has taken a worker's port, says all that the worker said, and has not the key."""

    def __init__(self, welcome: link_pb2.Welcome, metadata: tuple[tuple[str, bytes], ...]):
        self.heard: list[object] = []
        self.was_called = asyncio.Event()
        self._welcome = welcome
        self._metadata = metadata

    async def Link(self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: Any) -> None:
        self.was_called.set()
        await context.send_initial_metadata(self._metadata)
        await context.write(link_pb2.WorkerMessage(welcome=self._welcome))
        async for message in request_iterator:
            self.heard.append(message)


@pytest.mark.parametrize(
    "metadata",
    [(), (("moonshard-nonce-bin", bytes(32)), ("moonshard-proof-bin", bytes(32)))],
    ids=["says nothing", "makes a proof up"],
)
async def test_whoever_takes_the_port_of_a_lost_worker_is_told_nothing(
    gateway_config: GatewayConfig, kimi_folder, caplog: pytest.LogCaptureFixture, metadata
):
    worker = FakeWorker()
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        async with AsyncExitStack() as its_life:
            port = await its_life.enter_async_context(fake_worker.serving(worker))
            made = make_config(gateway_config, kimi_folder, [f"127.0.0.1:{port}"])
            running = await stack.enter_async_context(serving(made))
            await running.gateway.pool.wait_ready()
        await running.gateway.pool.wait_not_ready()
        stranger = Stranger(worker.welcome, metadata)
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        link_pb2_grpc.add_WorkerServicer_to_server(stranger, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await stranger.was_called.wait()
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=running.http, trust_env=False))
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 503
        link = running.gateway.pool.links[0]
        await until(lambda: "cluster.key_file" in link.trouble)
        await server.stop(None)
        assert (link.session, stranger.heard) == (None, [])
        assert "cluster.key_file" in caplog.text


async def test_without_a_worker_the_gateway_lives_and_is_not_ready(gateway_config: GatewayConfig, kimi_folder):
    config = make_config(gateway_config, kimi_folder, ["127.0.0.1:1"])
    async with serving(config) as running, httpx.AsyncClient(base_url=running.http, trust_env=False) as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert health.json()["workers"]["127.0.0.1:1"]
        not_ready = await client.get("/ready")
        assert not_ready.status_code == 503
        assert not_ready.json()["error"]["message"].startswith("no worker is ready (127.0.0.1:1: ")
        refused = await client.post("/v1/completions", json=ASKED)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert (await client.post("/v1/completions", json=ASKED | {"model": "other"})).status_code == 404


async def test_a_worker_that_is_gone_is_named_by_a_gateway_that_serves_with_the_others(
    gateway_config: GatewayConfig, kimi_folder
):
    lost, left = FakeWorker(), FakeWorker(epoch=b"2" * 16)
    async with (
        gateway_over(gateway_config, kimi_folder, lost, left) as running,
        httpx.AsyncClient(base_url=running.http, trust_env=False) as client,
    ):
        await wait_for_links(running, 2)
        gone, there = (link.address for link in running.gateway.pool.links)
        assert (await client.get("/ready")).json() == {"status": "ready", "workers": {gone: "ready", there: "ready"}}
        lost.die()
        assert await running.gateway.pool.wait_changed(5)
        ready = await client.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["workers"] == {gone: running.gateway.pool.links[0].trouble, there: "ready"}
        metrics = (await client.get("/metrics")).text
        assert f'moonshard_worker_up{{worker="{gone}"}} 0.0' in metrics
        assert f'moonshard_worker_up{{worker="{there}"}} 1.0' in metrics
        left.die()
        await asyncio.wait_for(running.gateway.pool.wait_not_ready(), 5)
        assert (await client.get("/ready")).status_code == 503
        lost.revive(epoch=b"3" * 16)
        await asyncio.wait_for(running.gateway.pool.wait_ready(), 5)
        assert (await client.get("/ready")).json()["workers"][gone] == "ready"


async def test_a_draining_worker_gets_no_requests(http: httpx.AsyncClient, running: RunningGateway, worker: FakeWorker):
    worker.send_load(draining=True)
    await asyncio.wait_for(running.gateway.pool.wait_not_ready(), 5)
    assert (await http.get("/ready")).status_code == 503
    assert (await http.post("/v1/completions", json=ASKED)).status_code == 503
    assert worker.runs == []


async def test_a_burst_is_shared_between_workers(gateway_config: GatewayConfig, kimi_folder):
    workers = FakeWorker(), FakeWorker(epoch=b"2" * 16)
    async with gateway_over(gateway_config, kimi_folder, *workers) as running:
        await wait_for_links(running, 2)
        for worker in workers:
            worker.script.may_step.clear()
        async with AsyncClient(running.grpc) as client:
            calls = [asyncio.create_task(client.generate([i], max_tokens=10)) for i in range(10)]
            await asyncio.wait_for(asyncio.gather(*(worker.seen(5) for worker in workers)), 5)
            for worker in workers:
                worker.script.may_step.set()
            await asyncio.gather(*calls)
        assert [running.gateway.pool.in_flight_tokens(link.address) for link in running.gateway.pool.links] == [0, 0]


async def wait_for_links(running: RunningGateway, num_links: int) -> None:
    """As an operator would see it."""
    async with asyncio.timeout(5), httpx.AsyncClient(base_url=running.http, trust_env=False) as client:
        while len(re.findall(r"moonshard_worker_up\{.*\} 1.0", (await client.get("/metrics")).text)) < num_links:
            pass


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"fingerprint": "0" * 64}, "fingerprint"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"vocab_size": 7}, "vocab_size"),
        ({"block_size": 7}, "block_size"),
        ({"protocol_version": PROTOCOL_VERSION + 1}, "protocol_version"),
        ({"role": "judge"}, "role"),
        ({"epoch": b"e" * 16}, "epoch"),  # another address of the same process
    ],
)
async def test_a_worker_that_does_not_fit_is_told_the_field_logged_once_and_not_routed_to(
    gateway_config: GatewayConfig, kimi_folder, caplog: pytest.LogCaptureFixture, change: dict, field: str
):
    good, odd = FakeWorker(), FakeWorker(epoch=b"2" * 16)
    for name, value in change.items():
        setattr(odd.welcome, name, value)
    odd.fall_silent()  # until the good one has set the measure
    async with asyncio.timeout(30), gateway_over(gateway_config, kimi_folder, good, odd) as running:
        odd.speak()
        while len(odd.refused) < 3:
            await running.gateway.pool.wait_changed(0.05)
        assert {refused.field for refused in odd.refused} == {field}
        assert [link.session is not None for link in running.gateway.pool.links] == [True, False]
        named = [record.getMessage() for record in caplog.records if record.name == LINKS_LOGGER]
        assert len(named) == 1
        assert odd.refused[0].message in named[0]
        assert field in named[0] or field == "epoch"


@pytest.mark.parametrize("gateway_config", [GatewayConfig(port=0, grpc_port=0, max_queued_requests=2)])
async def test_more_than_the_queue_holds_is_refused_before_any_work(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.may_step.clear()
    waiting = [asyncio.create_task(http.post("/v1/completions", json=ASKED)) for _ in range(2)]
    await worker.seen(2)
    refused = await http.post("/v1/completions", json=ASKED)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert len(worker.runs) == 2
    worker.script.may_step.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
    assert (await http.post("/v1/completions", json=ASKED)).status_code == 200


async def test_a_proxy_meant_for_the_web_does_not_stand_between_gateway_and_worker(
    gateway_config: GatewayConfig, kimi_folder, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with asyncio.timeout(10), gateway_over(gateway_config, kimi_folder, worker) as running:
        assert running.gateway.is_ready
