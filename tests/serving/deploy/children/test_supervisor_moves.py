"""Workers that come back elsewhere, and the gangs and the gateway that have to follow them there."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from itertools import count

from moonshard.serving.deploy.children.child import Child, OnEvent, OnLine
from moonshard.serving.deploy.children.role import Process
from moonshard.serving.deploy.children.supervisor import Supervisor, launch_here
from tests.serving.deploy.children.test_supervisor import PATIENCE, Recorder, Scripted, child, has_ended, running


class Moving(Scripted):
    """Each worker's next process listens elsewhere."""

    def __init__(self, workers: Sequence[Sequence[str]], **others: Sequence[str] | Sequence[Sequence[str]]):
        super().__init__(workers, **others)  # pyright: ignore[reportArgumentType]
        self._ports = count(7000)

    def _worker(self, index: int, previous: Mapping[str, object] | None) -> list[str]:
        self.calls.append((f"worker {index}", previous and previous["address"]))
        return child(self._workers[index], f"worker-{index}", f"127.0.0.1:{next(self._ports)}")


def leaders_told(commands: Scripted, follower: str) -> list[object]:
    return [leader for name, leader in commands.calls if name == follower]


async def test_a_worker_that_comes_back_elsewhere_is_told_to_the_gateway_which_goes_on():
    async with running(Moving([["lr"], ["lr"]], gateway=["olr"])) as (supervisor, recorder):
        await supervisor.start()
        gateway = recorder.pids["gateway"]
        await recorder.saw("gateway", "orders 127.0.0.1:7000 127.0.0.1:7001")
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("gateway", "orders 127.0.0.1:7002 127.0.0.1:7001")
        assert recorder.pids["gateway"] == gateway


async def test_a_gateway_that_is_started_again_is_started_with_where_workers_are_now():
    commands = Moving([["lr"]], gateway=["olr"])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("gateway", "orders 127.0.0.1:7001")
        os.kill(recorder.pids["gateway"], signal.SIGKILL)
        await recorder.saw("gateway", "ready", times=2)
        assert commands.calls[-1] == ("gateway", ["127.0.0.1:7001"])


async def test_the_followers_of_a_gang_that_comes_back_elsewhere_call_its_leader_there():
    commands = Moving([["lr"]], followers=[["r"]])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0.1", "ready", times=2)
        assert leaders_told(commands, "worker 0.1") == ["127.0.0.1:7000", "127.0.0.1:7001"]


async def test_a_follower_waits_for_a_leader_that_does_not_listen_again_yet():
    """It would call where the one before it was."""
    commands = Moving([["lr", "", "lr"]], followers=[["r"]])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0", "worker-0 waiting", times=2)
        assert leaders_told(commands, "worker 0.1") == ["127.0.0.1:7000"]
        leader = next(role for role in supervisor._roles if role.name == "worker 0")
        assert isinstance(leader._child, Child)
        os.kill(leader._child.pid, signal.SIGKILL)
        await recorder.saw("worker 0.1", "ready", times=2)
        assert leaders_told(commands, "worker 0.1") == ["127.0.0.1:7000", "127.0.0.1:7002"]


async def test_a_follower_that_waits_for_its_leader_is_stopped_too():
    async with running(Moving([["lr", ""]], followers=[["r"]])) as (supervisor, recorder):
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0", "worker-0 waiting", times=2)
        await supervisor.stop()
        assert all(role.task.done() for role in supervisor._roles)


class Held:
    """Starts processes here, but of one role only once that is let go."""

    def __init__(self, name: str):
        self._name = name
        self.is_asked = asyncio.Event()
        self.let_go = asyncio.Event()
        self.num_started = 0

    async def __call__(self, name: str, argv: Sequence[str], *, on_event: OnEvent, on_line: OnLine) -> Process:
        if name == self._name:
            self.num_started += 1
            if self.num_started == 2:
                self.is_asked.set()
                await self.let_go.wait()
        return await launch_here(name, argv, on_event=on_event, on_line=on_line)


async def test_a_member_that_is_just_being_started_as_its_gang_ends_is_started_once_more_for_the_next():
    """It was told of a leader that is gone."""
    commands, held, recorder = Moving([["lr"]], followers=[["r"]]), Held("worker 0.1"), Recorder()
    supervisor = Supervisor(commands, recorder, PATIENCE, held)
    try:
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await held.is_asked.wait()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0", "listening", times=3)
        held.let_go.set()
        await recorder.saw("worker 0.1 was ended by SIGKILL, 2 times in a row; trying again in 0.002 s")
        while len(leaders_told(commands, "worker 0.1")) < 3:
            await recorder.changed()
        assert leaders_told(commands, "worker 0.1")[-1] == "127.0.0.1:7002"
    finally:
        supervisor.kill()
        await supervisor.stop()
    assert all(has_ended(pid) for pid in recorder.pids.values())
