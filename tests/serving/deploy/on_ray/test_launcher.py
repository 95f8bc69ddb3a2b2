"""The launcher over a scripted driver, alone and under the supervisor: what is told, and what becomes of it."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.deploy.children.supervisor import Command, Supervisor
from moonshard.serving.deploy.on_ray import launcher as module
from moonshard.serving.deploy.on_ray.launcher import RayLauncher, RayPlan, carried
from moonshard.serving.deploy.on_ray.placement import WorkerNeeds
from tests.serving.deploy.children.test_supervisor import PATIENCE, Recorder, Scripted

KEY = "a1" * 32
PLAN = RayPlan(
    address="10.0.0.1:6379",
    workers=[WorkerNeeds("worker 0", 2, {"CPU": 1}), WorkerNeeds("worker 1", 1, {"CPU": 2})],
    environment={"JAX_PLATFORMS": "cpu"},
    key=KEY,
)


class OneGang(Scripted):
    """Only the first worker has followers."""

    def followers(self, worker: str, address: str) -> dict[str, Command]:
        return super().followers(worker, address) if worker == "worker 0" else {}


@contextlib.asynccontextmanager
async def launching(script: str, folder: Path) -> AsyncIterator[RayLauncher]:
    driver = (sys.executable, "-IS", str(Path(__file__).with_name("scripted_driver.py")), script)
    launcher = RayLauncher(PLAN, folder, lambda line: None, driver)
    try:
        yield launcher
    finally:
        await launcher.close()


def started(recorder: Recorder, name: str) -> list[dict]:
    """The orders to start this process, as the driver got them."""
    return [json.loads(news[1]) for news in recorder.news if news[0] == name and news[1].startswith("{")]


async def test_it_is_known_what_the_nodes_have(tmp_path: Path):
    async with launching("c", tmp_path) as launcher:
        assert await launcher.connect() == [{"CPU": 2.0}, {"CPU": 1.0}]


async def test_a_ray_that_is_not_there_is_an_error_in_the_drivers_words(tmp_path: Path):
    async with launching("f", tmp_path) as launcher:
        with pytest.raises(ConfigError, match="no Ray is reached"):
            await launcher.connect()


async def test_a_ray_that_says_nothing_is_waited_for_no_longer_than_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "CONNECT_S", 0.1)
    async with launching("s", tmp_path) as launcher:
        with pytest.raises(ConfigError, match=r"the Ray at 10\.0\.0\.1:6379 did not answer within 0\.1 s"):
            await launcher.connect()


async def test_a_gang_is_told_member_by_member_with_its_bundle_and_the_cluster_key_in_no_command(tmp_path: Path):
    recorder = Recorder()
    async with launching("c", tmp_path) as launcher:
        commands = OneGang([["lr"], ["lr"]], followers=[["r"]])
        supervisor = Supervisor(commands, recorder, PATIENCE, launcher.launch)
        try:
            await supervisor.start()
        finally:
            await supervisor.stop()
    [leader], [member], [alone] = (started(recorder, name) for name in ("worker 0", "worker 0.1", "worker 1"))
    assert (leader["gang"], leader["member"], leader["num_members"], leader["bundle"]) == ("worker 0", 0, 2, {"CPU": 1})
    assert (member["gang"], member["member"], member["num_members"], member["bundle"]) == ("worker 0", 1, 2, {"CPU": 1})
    assert (alone["gang"], alone["member"], alone["num_members"], alone["bundle"]) == ("worker 1", 0, 1, {"CPU": 2})
    assert leader["argv"][0] == "-ISc"  # without this machine's Python
    assert all((order["key"], order["environment"]) == (KEY, {"JAX_PLATFORMS": "cpu"}) for order in (leader, member))
    assert not any(KEY in word for word in leader["argv"])
    assert KEY not in repr(PLAN)


async def test_all_members_of_a_gang_are_started_again_when_one_ends_and_the_gateway_hears_where(tmp_path: Path):
    recorder, commands = Recorder(), Scripted([["lr"]], gateway=["olr"], followers=[["r"]])
    async with launching("c", tmp_path) as launcher:
        supervisor = Supervisor(commands, recorder, PATIENCE, launcher.launch)
        try:
            await supervisor.start()
            member = next(role for role in supervisor._roles if role.name == "worker 0.1")
            member.signal(signal.SIGKILL)
            member._signal = None
            for name in ("worker 0", "worker 0.1"):
                await recorder.saw(name, "ready", times=2)
            [first, second] = started(recorder, "worker 0")
            await recorder.saw("gateway", f"orders 10.0.0.{second['number']}:7000")
            told = [leader for name, leader in commands.calls if name == "worker 0.1"]
            assert told == [f"10.0.0.{first['number']}:7000", f"10.0.0.{second['number']}:7000"]
        finally:
            await supervisor.stop()


async def test_a_driver_that_ends_ends_its_processes_which_are_started_again_over_a_new_one(tmp_path: Path):
    recorder = Recorder()
    async with launching("c", tmp_path) as launcher:
        supervisor = Supervisor(Scripted([["lr"]]), recorder, PATIENCE, launcher.launch)
        try:
            await supervisor.start()
            worker = next(role for role in supervisor._roles if role.name == "worker 0")
            worker.signal(99)
            worker._signal = None
            await recorder.saw("worker 0", "ready", times=2)
            assert (f"worker 0: {module.LOST}; restarting it",) in recorder.news
        finally:
            await supervisor.stop()


async def test_closing_does_not_wait_for_a_driver_that_waits_for_ray(tmp_path: Path):
    there = asyncio.Event()
    driver = (sys.executable, "-ISc", "import signal; print('deaf', flush=True); signal.pause()")
    launcher = RayLauncher(PLAN, tmp_path, lambda line: there.set(), driver)
    connecting = asyncio.create_task(launcher.connect())
    await there.wait()
    async with asyncio.timeout(module.CLOSE_S / 2):
        await launcher.close()
    with pytest.raises(ConfigError):
        await connecting


def test_a_node_gets_what_jax_and_its_like_read_and_none_of_this_machines_places():
    environ: Mapping[str, str] = {
        "JAX_PLATFORMS": "cpu",
        "OTEL_SERVICE_NAME": "ours",
        "PATH": "/bin",
        "HOME": "/home/me",
        "JAX_COMPILATION_CACHE_DIR": "/home/me/cache",
        "MOONSHARD_API_KEY": "secret",
    }
    assert carried(environ) == {"JAX_PLATFORMS": "cpu", "OTEL_SERVICE_NAME": "ours"}


async def test_closing_ends_a_connected_driver_that_does_not_heed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.1)
    async with launching("cx", tmp_path) as launcher:
        await launcher.connect()
        await launcher.close()
        assert launcher._driver is None
