"""Where a worker says that it is; and of two at one address, that the one that gateways do not reach ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import ConfigError, GatewayConfig, WorkerConfig
from moonshard.serving.worker.process import known_to_gateways
from tests.dialling import own_key
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE, make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import until
from tests.serving.gateway.workers.registering import registry_over


@dataclass
class Announced:
    """A worker as its process registers it."""

    epoch: bytes
    was_reached: bool

    def welcome(self) -> link_pb2.Welcome:
        return FakeWorker(epoch=self.epoch).welcome


@asynccontextmanager
async def two_at_one_address(*, was_reached: bool) -> AsyncIterator[asyncio.Event]:
    """One is linked there, another claims to be; the block has what tells the other to end."""
    holder: Any = Announced(b"h" * 16, was_reached=True)
    claimant: Any = Announced(b"c" * 16, was_reached)
    stop, key = asyncio.Event(), own_key().proofs
    async with registry_over() as (pool, at), fake_worker.serving(FakeWorker(epoch=b"h" * 16)) as port:
        config = replace(make_config(GatewayConfig(), FIXTURE, []), worker=WorkerConfig(gateways=(at,)))
        async with known_to_gateways(config, key, port, holder, asyncio.Event()):
            await pool.wait_ready()
            async with known_to_gateways(config, key, port, claimant, stop):
                yield stop
            assert pool.worker_states() == {f"127.0.0.1:{port}": "ready"}


async def test_who_is_nowhere_else_ends_with_the_key_to_change():
    with pytest.raises(ConfigError) as ended:
        async with two_at_one_address(was_reached=False) as stop:
            await stop.wait()
    [fault] = ended.value.faults
    assert fault.startswith("worker.host: gateway 127.0.0.1:")
    assert "another process answers at 127.0.0.1:" in fault


async def test_who_was_reached_goes_on_since_only_that_gateway_is_led_astray(caplog: pytest.LogCaptureFixture):
    async with two_at_one_address(was_reached=True) as stop:
        await until(lambda: "not registered: another process answers at" in caplog.text)
        assert not stop.is_set()


async def test_a_worker_is_called_by_the_host_that_it_announces():
    holder: Any = Announced(b"h" * 16, was_reached=True)
    worker = FakeWorker(epoch=holder.epoch)
    async with registry_over() as (pool, at), fake_worker.serving(worker) as port:
        told = WorkerConfig(gateways=(at,), announced_host="localhost")
        config = replace(make_config(GatewayConfig(), FIXTURE, []), worker=told)
        async with known_to_gateways(config, own_key().proofs, port, holder, asyncio.Event()):
            await pool.wait_ready()
            assert pool.worker_states() == {f"localhost:{port}": "ready"}
