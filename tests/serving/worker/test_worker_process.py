"""How a worker's process ends: by a drain or by a fault, whichever comes first."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from moonshard.serving.deploy.life import Life
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.worker.process import ServedWorker


class FakeEngine:
    """An engine that fails when the test says so."""

    def __init__(self):
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FakeServer:
    def __init__(self):
        self.is_serving = False

    async def set_serving(self, is_serving: bool) -> None:
        self.is_serving = is_serving


class FakeWorker:
    """A worker that is idle when the test says so."""

    def __init__(self):
        self.engine = FakeEngine()
        self.is_draining = False
        self.is_flushing = False
        self.idle = asyncio.Event()
        self.asked_for_idle = asyncio.Event()
        self.is_closed = False
        self.has_failed = False
        self.is_told = asyncio.Event()

    def start_behind(self) -> None:
        self.is_told.set()

    def begin_drain(self) -> None:
        self.is_draining = True

    async def wait_idle(self) -> None:
        self.asked_for_idle.set()
        await self.idle.wait()

    async def close(self) -> None:
        self.is_closed = True

    def fail(self) -> None:
        self.has_failed = True


class Process:
    """A worker process whose life is under way."""

    def __init__(self, drain_timeout_s: float = 30.0):
        self.worker, self.server, self.stop = FakeWorker(), FakeServer(), asyncio.Event()
        worker: Any = self.worker
        server: Any = self.server
        self.events: list[str] = []
        life = Life(
            role="both",
            status=lambda event, _fields: self.events.append(event),
            start=ProcessStart(timings=Timings()),
            stop=self.stop,
            drain_timeout_s=drain_timeout_s,
        )
        living = life.live(ServedWorker(worker, server, drain_timeout_s), name="here", recorder=None)
        self.exit_code = asyncio.create_task(living)

    async def until_ready(self) -> None:
        await self.worker.is_told.wait()
        self.events.clear()

    async def drain(self) -> None:
        self.stop.set()
        await self.worker.asked_for_idle.wait()


async def test_a_drain_refuses_what_is_new_waits_for_what_runs_and_ends_with_0():
    process = Process()
    await process.until_ready()
    assert process.server.is_serving
    await process.drain()
    assert process.worker.is_draining
    assert process.events == ["draining"]
    assert not process.server.is_serving
    process.worker.idle.set()
    assert await asyncio.wait_for(process.exit_code, 5) == 0
    assert process.worker.is_closed


@pytest.mark.parametrize(
    ("is_flushing", "told"),
    [(False, "requests were still running after"), (True, "blocks still waited to be kept by kv.store after")],
)
async def test_a_drain_that_takes_too_long_is_cut_off(is_flushing: bool, told: str, caplog: pytest.LogCaptureFixture):
    """And what was cut off is told: once no request is left, only what is to be written may still wait."""
    process = Process(drain_timeout_s=0.01)
    process.worker.is_flushing = is_flushing
    process.stop.set()
    assert await asyncio.wait_for(process.exit_code, 5) == 0
    [record] = caplog.records
    assert record.getMessage().startswith(told)


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_fault_ends_the_process_at_once_with_1_also_in_a_drain(is_draining: bool):
    process = Process()
    await process.until_ready()
    if is_draining:
        await process.drain()
    process.worker.engine.failed.set_exception(RuntimeError("no device"))
    assert await asyncio.wait_for(process.exit_code, 5) == 1
    assert process.worker.has_failed


def test_the_port_can_open_before_jax_is_imported():
    code = "import sys, moonshard.serving.worker.process; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
