"""How a process that serves gets ready and ends, whatever it serves."""

import asyncio
import os
import signal
from collections.abc import Mapping

import pytest

from moonshard.serving.deploy.life import Life, stop_signals
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.deploy.timings import Timings


class Scripted:
    """Ready, idle and failed when the test says so; `did` is what was asked of it, and what health said."""

    def __init__(self) -> None:
        self.is_ready, self.is_not_ready, self.is_idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.did: list[object] = []
        self.news = asyncio.Event()

    def note(self, what: object) -> None:
        self.did.append(what)
        self.news.set()

    async def until(self, what: object) -> None:
        while what not in self.did:
            self.news.clear()
            await self.news.wait()

    async def failure(self) -> BaseException:
        return await self.failed

    async def set_serving(self, is_serving: bool) -> None:
        self.note(is_serving)

    async def wait_ready(self) -> None:
        await self.is_ready.wait()

    async def wait_not_ready(self) -> None:
        self.note("asked whether it is ready")
        await self.is_not_ready.wait()

    def on_ready(self) -> Mapping[str, object]:
        return {"message": "in words"}

    def on_told(self) -> None:
        self.note("told")

    def begin_drain(self) -> None:
        self.note("begin drain")

    async def wait_idle(self) -> None:
        self.note("asked whether it is idle")
        await self.is_idle.wait()

    async def cut_off(self) -> None:
        self.note("cut off")

    async def close(self) -> None:
        self.note("close")

    def fail(self, error: BaseException) -> None:
        self.note(error)


class Living:
    """A life on its way; its status is noted among what its process did."""

    def __init__(self, drain_timeout_s: float = 30.0) -> None:
        self.served, self.stop = Scripted(), asyncio.Event()
        self.life = Life(
            role="role",
            status=lambda event, fields: self.served.note((event, dict(fields))),
            start=ProcessStart(timings=Timings()),
            stop=self.stop,
            drain_timeout_s=drain_timeout_s,
        )
        self.exit_code = asyncio.create_task(self.life.live(self.served, name="here", recorder=None))

    @property
    def did(self) -> list[object]:
        return [what for what in self.served.did if not isinstance(what, tuple) or what[0] != "timings"]

    async def until_ready(self) -> None:
        self.served.is_ready.set()
        await self.served.until("asked whether it is ready")
        self.served.did.clear()


READY = [True, ("ready", {"message": "in words"}), "told", "asked whether it is ready"]
DRAINED = [("draining", {}), "begin drain", False, "asked whether it is idle"]


async def test_health_follows_readiness_and_ready_is_told_once():
    living = Living()
    living.served.is_ready.set()
    await living.served.until("asked whether it is ready")
    assert living.did == READY
    living.served.did.clear()
    living.served.is_ready.clear()
    living.served.is_not_ready.set()
    await living.served.until(False)
    assert living.did == [False]
    living.served.is_not_ready.clear()
    living.served.is_ready.set()
    await living.served.until("asked whether it is ready")
    assert living.did == [False, True, "asked whether it is ready"]
    living.stop.set()
    living.served.is_idle.set()
    assert await asyncio.wait_for(living.exit_code, 5) == 0


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_drain_is_told_takes_nothing_new_waits_and_closes(is_ready: bool):
    living = Living()
    if is_ready:
        await living.until_ready()
    living.stop.set()
    await living.served.until("asked whether it is idle")
    assert living.did == DRAINED
    assert not living.exit_code.done()
    living.served.is_idle.set()
    assert await asyncio.wait_for(living.exit_code, 5) == 0
    assert living.did == [*DRAINED, "close"]


async def test_a_drain_that_takes_too_long_is_cut_off_and_closes():
    living = Living(drain_timeout_s=0.01)
    await living.until_ready()
    living.stop.set()
    assert await asyncio.wait_for(living.exit_code, 5) == 0
    assert living.did == [*DRAINED, "cut off", "close"]


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_failure_ends_it_with_1_at_once_and_nothing_closes(is_draining: bool):
    living, error = Living(), RuntimeError("no device")
    await living.until_ready()
    if is_draining:
        living.stop.set()
        await living.served.until("asked whether it is idle")
    living.served.failed.set_result(error)
    assert await asyncio.wait_for(living.exit_code, 5) == 1
    assert living.did == [*(DRAINED if is_draining else []), error]


async def test_who_can_no_longer_follow_readiness_does_not_look_as_if_it_were_serving():
    living = Living()

    def broken() -> Mapping[str, object]:
        raise RuntimeError("a fault of ours")

    living.served.on_ready = broken
    living.served.is_ready.set()
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await asyncio.wait_for(living.exit_code, 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_stops_and_a_second_changes_nothing(number: signal.Signals):
    with stop_signals() as stop:
        assert not stop.is_set()
        for _ in range(2):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stop.wait(), 5)
