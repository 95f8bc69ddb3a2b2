"""How a worker's process ends: by a drain or by a fault, whichever comes first."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.life import Life
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.gang.members import GangFault
from moonshard.serving.worker import process as worker_process
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
        self.closes_when: asyncio.Event | None = None  # None: at once
        self.is_closing = asyncio.Event()

    def start_behind(self) -> None:
        self.is_told.set()

    def begin_drain(self) -> None:
        self.is_draining = True

    async def wait_idle(self) -> None:
        self.asked_for_idle.set()
        await self.idle.wait()

    async def close(self) -> None:
        self.is_closing.set()
        if self.closes_when is not None:
            await self.closes_when.wait()
        self.is_closed = True

    def fail(self) -> None:
        self.has_failed = True


class Process:
    """A worker process whose life is under way."""

    def __init__(self, drain_timeout_s: float = 30.0, gang: "FakeGang | None" = None):
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
        served = ServedWorker(worker, server, drain_timeout_s, gang=cast(Any, gang))
        living = life.live(served, name="here", recorder=None)
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


class Ended(BaseException):
    """Where the process would have ended."""


class FakeGang:
    """A gang that fails when the test says so."""

    def __init__(self):
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_ended = False

    async def end(self) -> None:
        self.has_ended = True


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which this process would have ended at once."""
    codes: list[int] = []

    def end_at_once(code: int, message: str = "") -> NoReturn:
        codes.append(code)
        raise Ended(message)

    monkeypatch.setattr(worker_process, "end_at_once", end_at_once)
    return codes


async def load_in_a_gang(
    monkeypatch: pytest.MonkeyPatch, outcome: BaseException | None
) -> tuple[FakeGang, list[tuple[str, object]]]:
    """A leader whose members are there, and that fails to load, or is told to stop meanwhile. What it told."""

    async def gathered(*_: object) -> object:
        return lambda: None

    async def load(*_: object) -> None:
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(worker_process, "_gathered", gathered)
    monkeypatch.setattr(worker_process, "_load", load)
    gang, told = FakeGang(), list[tuple[str, object]]()
    life = SimpleNamespace(status=lambda event, fields: told.append((event, fields.get("exit_code"))))
    assert await worker_process._loaded(*cast(Any, (load_config(None, []), "both", None, life, gang))) is None
    return gang, told


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError(["kv.slab_bytes: too large"]), 2), (GangFault("member 1 went away"), 1)]
)
async def test_a_leader_that_cannot_load_ends_before_anybody_else_can_say_so(
    monkeypatch: pytest.MonkeyPatch, ended: list[int], error: Exception, code: int
):
    with pytest.raises(Ended):
        await load_in_a_gang(monkeypatch, error)
    assert ended == [code]


async def test_a_leader_that_is_told_to_end_while_it_loads_tells_the_others(monkeypatch: pytest.MonkeyPatch):
    gang, told = await load_in_a_gang(monkeypatch, None)
    assert gang.has_ended
    assert not told


async def test_in_a_gang_any_fault_ends_the_process_at_once(ended: list[int]):
    process = Process(gang=FakeGang())
    await process.until_ready()
    process.worker.engine.failed.set_exception(RuntimeError("no device"))
    with pytest.raises(Ended):
        await asyncio.wait_for(process.exit_code, 5)
    assert ended == [1]
    assert not process.worker.is_closed


async def test_a_member_that_is_lost_while_the_leader_closes_does_not_keep_it(ended: list[int]):
    gang = FakeGang()
    process = Process(gang=gang)
    process.worker.closes_when = asyncio.Event()
    await process.until_ready()
    await process.drain()
    process.worker.idle.set()
    await process.worker.is_closing.wait()
    gang.failed.set_exception(GangFault("member 1 of the gang went away"))
    with pytest.raises(Ended):
        await asyncio.wait_for(process.exit_code, 5)
    assert ended == [1]


def test_the_port_can_open_before_jax_is_imported():
    code = "import sys, moonshard.serving.worker.process; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
