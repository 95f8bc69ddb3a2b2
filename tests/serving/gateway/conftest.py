"""The gateway as it is deployed, on loopback, over a scripted worker."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from moonshard.rpc.client import AsyncClient
from moonshard.serving.config.keys import Config, GatewayConfig, ModelConfig, RoutingConfig
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.fake_worker import FakeWorker

FIXTURE = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
MODEL_NAME = "kimi"
MAX_BODY_BYTES = 1 << 20


@pytest.fixture
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def gateway_config() -> GatewayConfig:
    return GatewayConfig(port=0, grpc_port=0, max_body_bytes=MAX_BODY_BYTES, drain_timeout_s=5)


@pytest.fixture
def keep_alive_s() -> float:
    return 10.0


@pytest.fixture
def kimi_folder() -> Path:
    return FIXTURE


@pytest.fixture
def model_path(kimi_folder: Path) -> Path:
    return kimi_folder


def with_file(folder: Path, out: Path, name: str, text: str) -> Path:
    """The folder's files linked into `out`, but for one that has this text. Returns `out`."""
    for path in folder.iterdir():
        if path.name != name:
            (out / path.name).symlink_to(path)
    (out / name).write_text(text)
    return out


@pytest.fixture
async def running(
    worker: FakeWorker, gateway_config: GatewayConfig, model_path: Path, keep_alive_s: float
) -> AsyncIterator[RunningGateway]:
    async with fake_worker.serving(worker) as port:
        config = make_config(gateway_config, model_path, [f"127.0.0.1:{port}"])
        async with asyncio.timeout(60), serving(config, keep_alive_s=keep_alive_s) as running:
            await running.gateway.pool.wait_ready()
            yield running


def make_config(gateway: GatewayConfig, model_path: Path, workers: list[str]) -> Config:
    return Config(
        model=ModelConfig(path=model_path, name=MODEL_NAME),
        gateway=replace(gateway, workers=tuple(workers)),
        routing=RoutingConfig(failover_wait_s=0.5),  # no worker of these tests comes back
    )


@pytest.fixture
async def http(running: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture
async def grpc_client(running: RunningGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.grpc) as client:
        yield client
