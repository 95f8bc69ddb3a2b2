"""Start, signal, drain and exit of the gateway process."""

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.server.server import PortInUse
from moonshard.serving.config.addresses import default_worker_addresses
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.gateway import process as gateway_process
from moonshard.serving.gateway.pipeline.model import ServedModel
from moonshard.serving.gateway.process import ServedGateway, run_gateway, worker_addresses
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import make_config
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens
from tests.serving.gateway.workers.fleet import HANG_S, decode_worker, fleet, prefill_worker

ASKED = {"model": "kimi", "prompt": [1, 2], "max_tokens": 4, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Process:
    """`run_gateway` as a task. Signals go to the test's own process, where it has its handlers."""

    task: asyncio.Task[int]
    listening: Mapping[str, object]
    http: httpx.AsyncClient

    def terminate(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@asynccontextmanager
async def process(config: GatewayConfig, path: Path, worker: FakeWorker) -> AsyncIterator[Process]:
    events: asyncio.Queue[tuple[str, Mapping[str, object]]] = asyncio.Queue()

    def tell(event: str, fields: Mapping[str, object]) -> None:
        if event != "timings":
            events.put_nowait((event, fields))

    async with fake_worker.serving(worker) as port, asyncio.timeout(30):
        made = make_config(config, path, [f"127.0.0.1:{port}"])
        task = asyncio.create_task(run_gateway(made, status=tell, start=ProcessStart(timings=Timings())))
        name, listening = await events.get()
        assert name == "listening"
        assert gc.get_freeze_count() > 0  # see serving/deploy/heap.py
        gc.unfreeze()
        assert (await events.get())[0] == "ready"
        async with httpx.AsyncClient(base_url=str(listening["http"]), trust_env=False, timeout=20) as http:
            yield Process(task, listening, http)
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0
        assert events.get_nowait()[0] == "draining"


async def test_a_drain_tells_first_then_finishes_what_runs_and_refuses_the_rest(
    gateway_config: GatewayConfig, kimi_folder: Path, worker: FakeWorker
):
    async with process(gateway_config, kimi_folder, worker) as gateway:
        worker.script.may_step.clear()
        async with AsyncClient(str(gateway.listening["grpc"])) as client:
            assert await client.health()
            call = asyncio.create_task(client.generate([1, 2], max_tokens=4))
            running = asyncio.create_task(gateway.http.post("/v1/completions", json=ASKED))
            await worker.seen(2)
            gateway.terminate()
            while (await gateway.http.get("/ready")).status_code == 200:
                pass
            assert not await client.health()
            refused = await gateway.http.post("/v1/completions", json=ASKED)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert (await gateway.http.get("/health")).status_code == 200
            worker.script.may_step.set()
            assert (await running).json()["choices"][0]["token_ids"] == expected_tokens([1, 2], 4)
            assert (await call).choices[0].token_ids == tuple(expected_tokens([1, 2], 4))
        assert await gateway.task == 0


async def test_what_does_not_finish_in_time_ends_as_unavailable(
    gateway_config: GatewayConfig, kimi_folder: Path, worker: FakeWorker
):
    config = replace(gateway_config, drain_timeout_s=0.1)
    async with process(config, kimi_folder, worker) as gateway:
        worker.script.may_step.clear()
        running = asyncio.create_task(gateway.http.post("/v1/completions", json=ASKED))
        await worker.seen(1)
        gateway.terminate()
        assert (await running).status_code == 503
        assert await gateway.task == 0


async def test_what_waits_for_a_thread_when_the_time_is_over_ends_as_unavailable(
    gateway_config: GatewayConfig, kimi_folder: Path, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """No worker has it, so that nobody but the server itself can end it."""
    begun, may_end = threading.Event(), threading.Event()

    def blocked(*_args: object, **_kwargs: object) -> list[int]:
        begun.set()
        may_end.wait(60)
        return [1]

    monkeypatch.setattr(ServedModel, "_encode", blocked)
    config = replace(gateway_config, drain_timeout_s=0.1)
    async with process(config, kimi_folder, worker) as gateway:
        running = asyncio.create_task(gateway.http.post("/v1/completions", json={"prompt": "word " * 1_000}))
        await asyncio.to_thread(begun.wait, 20)
        gateway.terminate()
        answer = await running
        may_end.set()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
        assert float(answer.headers["retry-after"]) > 0
        assert await gateway.task == 0


@pytest.mark.parametrize("comes", [True, False])
async def test_a_gateway_is_ready_once_a_prefill_worker_is_there_too_or_none_came(
    monkeypatch: pytest.MonkeyPatch, *, comes: bool
):
    monkeypatch.setattr(gateway_process, "COMPLETE_WITHIN_S", HANG_S if comes else 0.01)
    async with fleet(decode_worker()) as running, fake_worker.serving(prefill_worker()) as port:
        pool = running.gateway.pool
        ready = asyncio.create_task(ServedGateway(running, Timings(), 0.0).wait_ready())
        if comes:
            await asyncio.sleep(0)  # it waits now
            assert pool.is_ready
            assert not ready.done()
            pool.call(f"127.0.0.1:{port}")
        await ready
        assert pool.knowledge.dispatcher.fleet.is_complete is comes


async def test_a_gateway_whose_only_worker_went_before_another_came_is_not_ready(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gateway_process, "COMPLETE_WITHIN_S", HANG_S)
    async with fleet(decode_worker()) as running, fake_worker.serving(FakeWorker()) as port:
        pool = running.gateway.pool
        ready = asyncio.create_task(ServedGateway(running, Timings(), 0.0).wait_ready())
        await asyncio.sleep(0)  # it waits for one that prefills
        pool.remove(pool.links[0].address)
        for _ in range(10):  # turns in which it hears of it
            await asyncio.sleep(0)
        assert not ready.done()
        pool.call(f"127.0.0.1:{port}")
        await ready
        assert pool.is_ready


def test_workers_that_nobody_named_are_looked_for_where_they_listen_by_default(
    gateway_config: GatewayConfig, kimi_folder: Path
):
    config = make_config(gateway_config, kimi_folder, [])
    assert worker_addresses(config) == default_worker_addresses(config)
    assert worker_addresses(make_config(gateway_config, kimi_folder, ["a:1", "b:2"])) == ("a:1", "b:2")


@pytest.mark.parametrize("key", ["port", "grpc_port"])
async def test_a_port_in_use_ends_the_start(gateway_config: GatewayConfig, kimi_folder: Path, key: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = make_config(replace(gateway_config, **{key: port}), kimi_folder, ["127.0.0.1:1"])
        with pytest.raises(PortInUse) as caught:
            await run_gateway(config, status=lambda _event, _fields: None, start=ProcessStart(timings=Timings()))
    assert caught.value.port == port
