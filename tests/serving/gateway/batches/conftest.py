"""A gateway that serves batches, over a scripted worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from moonshard.serving.config.keys import BatchesConfig, GatewayConfig
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import make_config
from tests.serving.gateway.fake_worker import FakeWorker

MAX_BYTES = 1 << 20


@pytest.fixture
def batches_path(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def batches_config(batches_path: Path) -> BatchesConfig:
    return BatchesConfig(path=batches_path, max_bytes=MAX_BYTES)


@asynccontextmanager
async def a_gateway(
    worker: FakeWorker, gateway: GatewayConfig, batches: BatchesConfig, model_path: Path
) -> AsyncIterator[RunningGateway]:
    async with fake_worker.serving(worker) as port:
        config = replace(make_config(gateway, model_path, [f"127.0.0.1:{port}"]), batches=batches)
        async with serving(config) as running:
            await running.gateway.pool.wait_ready()
            yield running


@pytest.fixture
async def running(
    worker: FakeWorker, gateway_config: GatewayConfig, batches_config: BatchesConfig, model_path: Path
) -> AsyncIterator[RunningGateway]:
    async with a_gateway(worker, gateway_config, batches_config, model_path) as running:
        yield running
