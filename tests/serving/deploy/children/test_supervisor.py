"""The supervisor over scripted child processes: order, failure, restart, drain, and nothing left running."""

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from moonshard.serving.deploy.children.role import ChildFailed, RestartLimits
from moonshard.serving.deploy.children.supervisor import Command, Supervisor, supervise

# A child obeys the letters of its script, then waits for signals. l: listening, r: ready, f: failed with exit code 2,
# x: exit with code 3, t: the same within a status line, z: with 0, d: drain (on SIGTERM say so, end on SIGUSR1),
# i: ignore SIGTERM, g: a grandchild that ignores it, o: say what it is told.
CHILD = r"""
import json, os, signal, subprocess, sys, threading
script, name, address = sys.argv[1:4]
fd = int(sys.argv[-1])
def tell(event, **fields):
    os.write(fd, json.dumps({"event": event, **fields}).encode() + b"\n")
def told(number, frame):
    print(name, "told", flush=True)
    os._exit(0)
def drain(number, frame):
    print(name, "draining", flush=True)
def hear():
    for line in open(int(sys.argv[sys.argv.index("--orders-fd") + 1])):
        print("orders", *json.loads(line)["addresses"], flush=True)
signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(0))
signal.signal(signal.SIGTERM, told)
for letter in script:
    if letter == "l": tell("listening", address=address, pid=os.getpid())
    if letter == "r": tell("ready")
    if letter == "f": tell("failed", message="no such tensor", exit_code=2); sys.exit(2)
    if letter == "x": sys.exit(3)
    if letter == "t": os.write(fd, b'{"event": "tim'); sys.exit(3)
    if letter == "z": sys.exit(0)
    if letter == "d": signal.signal(signal.SIGTERM, drain)
    if letter == "i": signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if letter == "o": threading.Thread(target=hear, daemon=True).start()
    if letter == "g":
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
        print("grandchild", subprocess.Popen([sys.executable, "-ISc", code]).pid, flush=True)
print(name, "waiting", flush=True)
while True:
    signal.pause()
"""


class Scripted:
    """Commands whose children obey scripts; each process of a role takes the role's next script, if it has one left."""

    def __init__(
        self,
        workers: Sequence[Sequence[str]],
        gateway: Sequence[str] = ("lr",),
        beside: Sequence[str] | None = None,
        followers: Sequence[Sequence[str]] = (),
    ):
        self._followers = [list(scripts) for scripts in followers]
        self._beside = None if beside is None else list(beside)
        self._workers = [list(scripts) for scripts in workers]
        self._gateway = list(gateway)
        self.calls: list[tuple[str, object]] = []

    @property
    def beside(self) -> dict[str, Command]:
        scripts = self._beside
        return {} if scripts is None else {"store": lambda _: child(scripts, "store", "127.0.0.1:9000")}

    @property
    def workers(self) -> dict[str, Command]:
        return {f"worker {index}": partial(self._worker, index) for index in range(len(self._workers))}

    def _worker(self, index: int, previous: Mapping[str, object] | None) -> list[str]:
        self.calls.append((f"worker {index}", previous and previous["address"]))
        return child(self._workers[index], f"worker-{index}", f"127.0.0.1:{7000 + index}")

    def followers(self, worker: str, address: str) -> dict[str, Command]:
        return {
            f"{worker}.{index}": partial(self._follower, scripts, f"{worker}.{index}", address)
            for index, scripts in enumerate(self._followers, 1)
        }

    def _follower(self, scripts: list[str], name: str, leader: str, previous: Mapping[str, object] | None) -> list[str]:
        self.calls.append((name, leader))
        return child(scripts, name, "")

    def gateway(self, workers: Sequence[str], previous: Mapping[str, object] | None) -> list[str]:
        self.calls.append(("gateway", list(workers)))
        return child(self._gateway, "gateway", "127.0.0.1:8000")


def child(scripts: list[str], name: str, address: str) -> list[str]:
    script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
    return [sys.executable, "-ISc", CHILD, script, name, address]


class Recorder:
    """A reporter that remembers, and that can be waited for."""

    def __init__(self):
        self.news: list[tuple[str, ...]] = []
        self.pids: dict[str, int] = {}
        self._changed = asyncio.Event()

    def event(self, child: str, event: str, fields: Mapping[str, object]) -> None:
        if isinstance(pid := fields.get("pid"), int):
            self.pids[child] = pid
        self._add(child, event)

    def line(self, child: str, text: str) -> None:
        self._add(child, text)

    def note(self, text: str) -> None:
        self._add(text)

    def _add(self, *news: str) -> None:
        self.news.append(news)
        self._changed.set()

    async def saw(self, *news: str, times: int = 1) -> None:
        while self.news.count(news) < times:
            await self.changed()

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def grandchild(self) -> int:
        return next(int(text.split()[1]) for _, text in self.news if text.startswith("grandchild "))


HASTE = RestartLimits(gateway_drain_s=0.2, drain_s=0.4, first_backoff_s=0.001)
PATIENCE = RestartLimits(first_backoff_s=0.001)


@contextlib.asynccontextmanager
async def running(commands: Scripted, limits: RestartLimits = PATIENCE) -> AsyncIterator[tuple[Supervisor, Recorder]]:
    recorder = Recorder()
    supervisor = Supervisor(commands, recorder, limits)
    try:
        yield supervisor, recorder
    finally:
        supervisor.kill()
        await supervisor.stop()


def has_ended(pid: int) -> bool:
    """Waits until the process is gone or a zombie. True at once for one that is not there."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 20)[0])
    finally:
        os.close(fd)


async def test_the_gateway_starts_with_every_workers_address_and_all_must_be_ready():
    commands = Scripted([["lr"], ["lr"]])
    async with running(commands) as (supervisor, recorder):
        listening = await supervisor.start()
        assert listening["address"] == "127.0.0.1:8000"
        assert commands.calls[-1] == ("gateway", ["127.0.0.1:7000", "127.0.0.1:7001"])
        assert {name for name, news in recorder.news if news == "ready"} == {"worker 0", "worker 1", "gateway"}


async def test_start_waits_for_the_slowest_worker():
    async with running(Scripted([["lr"], ["l"]])) as (supervisor, recorder):
        starting = asyncio.create_task(supervisor.start())
        await recorder.saw("worker 1", "worker-1 waiting")
        await recorder.saw("gateway", "ready")
        await recorder.saw("worker 0", "ready")
        assert not starting.done()
        starting.cancel()


async def test_a_child_that_fails_at_start_ends_everything_with_its_message_and_code(caplog: pytest.LogCaptureFixture):
    async with running(Scripted([["lr"], ["lf"]])) as (supervisor, _):
        with pytest.raises(ChildFailed) as raised:
            await supervisor.start()
    assert (raised.value.message, raised.value.exit_code) == ("no such tensor", 2)
    gc.collect()
    assert caplog.records == []  # nothing that the event loop complains of


async def test_a_child_that_ends_without_a_word_before_it_was_ready_is_named():
    async with running(Scripted([["lx"]])) as (supervisor, _):
        with pytest.raises(ChildFailed) as raised:
            await supervisor.start()
    assert (raised.value.message, raised.value.exit_code) == ("worker 0 ended with exit code 3 before it was ready", 3)


async def test_a_crashed_worker_is_restarted_in_the_same_place():
    commands = Scripted([["lr"]])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0", "ready", times=2)
        assert commands.calls == [("worker 0", None), ("gateway", ["127.0.0.1:7000"]), ("worker 0", "127.0.0.1:7000")]
        assert ("worker 0 was ended by SIGKILL; restarting it",) in recorder.news


async def test_a_child_that_keeps_crashing_is_tried_again_while_the_others_go_on():
    commands = Scripted([["lr", "lrx", "x", "f", "f", "f", "lr"], ["lr"]])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        others = {name: pid for name, pid in recorder.pids.items() if name != "worker 0"}
        watching = asyncio.create_task(supervisor.watch())
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0", "worker-0 waiting", times=2)
        assert not watching.done()
        watching.cancel()
        assert {name: recorder.pids[name] for name in others} == others
        notes = [news[0] for news in recorder.news if len(news) == 1]
        assert notes == [
            "worker 0 was ended by SIGKILL; restarting it",
            "worker 0 ended with exit code 3, 2 times in a row; trying again in 0.002 s",
            "worker 0 ended with exit code 3, 3 times in a row; trying again in 0.004 s",
            *(
                f"worker 0: no such tensor, {times} times in a row; trying again in {0.001 * 2 ** (times - 1):g} s"
                for times in (4, 5, 6)
            ),
        ]


async def test_a_gateway_that_cannot_come_back_leaves_the_workers_alone():
    commands = Scripted([["lr"]], gateway=["lr", *(["f"] * 5), "lr"])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        worker = recorder.pids["worker 0"]
        os.kill(recorder.pids["gateway"], signal.SIGKILL)
        await recorder.saw("gateway", "ready", times=2)
        assert recorder.pids["worker 0"] == worker


async def test_a_process_that_cannot_be_started_at_all_is_tried_again_too():
    class Vanishing(Scripted):
        def _worker(self, index: int, previous: Mapping[str, object] | None) -> list[str]:
            argv = super()._worker(index, previous)
            return ["/no/such/program"] if len(self.calls) == 3 else argv

    async with running(Vanishing([["lr"]])) as (supervisor, recorder):
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0", "ready", times=2)
        told = "worker 0 could not be started: No such file or directory, 2 times in a row; trying again in 0.002 s"
        assert (told,) in recorder.news


async def test_a_status_line_that_its_processs_end_has_cut_off_ends_nothing():
    async with running(Scripted([["lr", "t", "lr"]])) as (supervisor, recorder):
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0", "ready", times=2)
        assert ("worker 0", 'unreadable status \'{"event": "tim\'') in recorder.news


def test_the_wait_grows_with_every_crash_in_a_row_and_has_an_end():
    waits_s = [RestartLimits().backoff_s(num_crashes) for num_crashes in (1, 2, 3, 7, 8, 9, 10**6)]
    assert waits_s == [0.25, 0.5, 1.0, 16.0, 30.0, 30.0, 30.0]


async def test_a_child_that_had_served_for_long_is_restarted_as_at_its_first_crash():
    limits = RestartLimits(first_backoff_s=0.001, settled_s=0.0)  # so long is any time
    async with running(Scripted([["lr"]]), limits) as (supervisor, recorder):
        await supervisor.start()
        for times in range(1, 4):
            await recorder.saw("worker 0", "ready", times=times)
            os.kill(recorder.pids["worker 0"], signal.SIGKILL)
            await recorder.saw("worker 0 was ended by SIGKILL; restarting it", times=times)


async def test_a_worker_that_somebody_drains_is_started_again_in_its_place_as_often_as_that_happens():
    commands = Scripted([["lr"]])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        for times in range(1, 5):
            await recorder.saw("worker 0", "worker-0 waiting", times=times)
            os.kill(recorder.pids["worker 0"], signal.SIGTERM)
            await recorder.saw("worker 0", "ready", times=times + 1)
        assert commands.calls[2:] == [("worker 0", "127.0.0.1:7000")] * 4
        assert ("worker 0 has drained and ended; starting it again",) in recorder.news


async def test_a_worker_that_ends_with_zero_before_it_serves_again_counts_as_crashed():
    async with running(Scripted([["lr", "lz", "lr"]])) as (supervisor, recorder):
        await supervisor.start()
        os.kill(recorder.pids["worker 0"], signal.SIGKILL)
        await recorder.saw("worker 0", "ready", times=2)
        told = "worker 0 ended with exit code 0, 2 times in a row; trying again in 0.002 s"
        assert (told,) in recorder.news


async def test_workers_are_told_to_end_only_after_the_gateway_has_drained():
    async with running(Scripted([["lr"]], gateway=["ldr"])) as (supervisor, recorder):
        await supervisor.start()
        stopping = asyncio.create_task(supervisor.stop())
        await recorder.saw("gateway", "gateway draining")
        assert ("worker 0", "worker-0 told") not in recorder.news
        os.kill(recorder.pids["gateway"], signal.SIGUSR1)
        await stopping
        assert recorder.news[-1] == ("worker 0", "worker-0 told")
        assert all(has_ended(pid) for pid in recorder.pids.values())


async def test_what_is_beside_the_workers_is_told_to_end_only_after_they_have():
    async with running(Scripted([["ldr"]], beside=["r"])) as (supervisor, recorder):
        await supervisor.start()
        stopping = asyncio.create_task(supervisor.stop())
        await recorder.saw("worker 0", "worker-0 draining")
        await recorder.saw("gateway", "gateway told")
        assert ("store", "store told") not in recorder.news
        os.kill(recorder.pids["worker 0"], signal.SIGUSR1)
        await stopping
        assert recorder.news[-1] == ("store", "store told")


async def test_what_is_beside_the_workers_is_started_again_and_they_hear_nothing_of_it():
    commands = Scripted([["lr"]], beside=["lr", "lrx", "lr"])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        others = {name: pid for name, pid in recorder.pids.items() if name != "store"}
        os.kill(recorder.pids["store"], signal.SIGKILL)
        await recorder.saw("store", "store waiting", times=2)
        assert {name: recorder.pids[name] for name in others} == others


async def test_what_is_beside_the_workers_and_cannot_start_ends_everything():
    async with running(Scripted([["lr"]], beside=["f"])) as (supervisor, _):
        with pytest.raises(ChildFailed, match="no such tensor"):
            await supervisor.start()


async def test_children_that_ignore_sigterm_are_killed_with_their_own_children():
    async with running(Scripted([["lgir"]], gateway=["lir"]), HASTE) as (supervisor, recorder):
        await supervisor.start()
        await supervisor.stop()
        assert ("worker 0 did not end within 0.4 s and is killed",) in recorder.news
        assert all(has_ended(pid) for pid in (*recorder.pids.values(), recorder.grandchild()))


async def test_stopping_while_a_worker_still_loads_leaves_nothing():
    async with running(Scripted([["l"]])) as (supervisor, recorder):
        starting = asyncio.create_task(supervisor.start())
        await recorder.saw("worker 0", "worker-0 waiting")
        starting.cancel()
        await supervisor.stop()
        assert has_ended(recorder.pids["worker 0"])


@pytest.mark.parametrize("num_turns", range(8))
async def test_nothing_is_started_any_more_once_it_stops(num_turns: int):
    """So many turns of the loop after a worker has listened, of which the gateway is started in one."""
    async with running(Scripted([["l"]]), HASTE) as (supervisor, recorder):
        starting = asyncio.create_task(supervisor.start())
        await recorder.saw("worker 0", "listening")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        starting.cancel()
        async with asyncio.timeout(20):
            await supervisor.stop()


async def test_a_process_that_is_just_being_started_is_stopped_too():
    async with running(Scripted([["lr"]]), HASTE) as (supervisor, recorder):
        starting = asyncio.create_task(supervisor.start())
        for _ in range(3):  # into the fork, no further
            await asyncio.sleep(0)
        starting.cancel()
        await supervisor.stop()
        assert recorder.news == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_drains_and_ends_with_zero(number: int):
    recorder = Recorder()
    code = await supervise(
        Scripted([["lr"]]), recorder, PATIENCE, on_ready=lambda listening: os.kill(os.getpid(), number)
    )
    assert code == 0
    assert recorder.news[-1] == ("worker 0", "worker-0 told")


async def test_a_second_interrupt_does_not_wait_for_the_drain():
    recorder = Recorder()
    interrupt = lambda *_: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    supervised = asyncio.create_task(
        supervise(Scripted([["lr"]], gateway=["ldr"]), recorder, PATIENCE, on_ready=interrupt)
    )
    await recorder.saw("gateway", "gateway draining")
    interrupt()
    assert await supervised == 130
    assert all(has_ended(pid) for pid in recorder.pids.values())


async def test_a_failed_start_gives_the_childs_exit_code_and_message():
    recorder = Recorder()
    assert await supervise(Scripted([["f"]]), recorder, PATIENCE, on_ready=lambda _: None) == 2
    assert ("no such tensor",) in recorder.news


class Told(Scripted):
    """Knows when the gateway is started: the worker has said by then that it listens."""

    def __init__(self):
        super().__init__([["l"]], gateway=["l"])
        self.has_spoken = threading.Event()

    def gateway(self, workers: Sequence[str], previous: Mapping[str, object] | None) -> list[str]:
        self.has_spoken.set()
        return super().gateway(workers, previous)


async def test_what_the_check_finds_ends_a_start_and_all_its_children_of_which_nothing_is_reported():
    recorder, commands, before = Recorder(), Told(), set(psutil.Process().children())

    def check() -> None:
        assert commands.has_spoken.wait(60)
        raise ValueError("a damaged tokenizer")

    with pytest.raises(ValueError, match="a damaged tokenizer"):
        await supervise(commands, recorder, PATIENCE, on_ready=lambda _: None, check=check)
    assert recorder.news == []
    assert set(psutil.Process().children()) <= before


async def test_what_children_say_is_reported_once_the_check_has_ended():
    recorder, commands = Recorder(), Told()
    reported: list[tuple[str, ...]] = []  # by then

    def check() -> None:
        assert commands.has_spoken.wait(60)
        reported.extend(recorder.news)

    supervisor = Supervisor(commands, recorder, PATIENCE)
    starting = asyncio.create_task(supervisor.start(check))
    try:
        await recorder.saw("worker 0", "listening")
        await recorder.saw("gateway", "gateway waiting")
        assert reported == []
    finally:
        starting.cancel()
        await supervisor.stop()


async def test_a_start_that_fails_does_not_wait_for_the_check():
    over = threading.Event()
    supervisor = Supervisor(Scripted([["f"]]), Recorder(), PATIENCE)
    try:
        with pytest.raises(ChildFailed):
            await supervisor.start(over.wait)
    finally:
        over.set()
        await supervisor.stop()


SUPERVISED = """
import sys, signal
from moonshard.serving.deploy.status_pipe import open_status_pipe
status = open_status_pipe(int(sys.argv[-1]))
print(__import__("os").getpid(), flush=True)
signal.pause()
"""

SUPERVISOR = """
import asyncio, os, sys
from moonshard.serving.deploy.children.child import start_child
async def main():
    argv = [sys.executable, "-c", sys.argv[1]]
    child = await start_child(argv, on_event=print, on_line=lambda line: print(line, flush=True))
    await child.wait()
asyncio.run(main())
"""


def test_children_do_not_outlive_a_killed_supervisor():
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, SUPERVISED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.kill()
        assert has_ended(pid)


def test_a_child_whose_supervisor_is_gone_before_it_looks_ends_at_once(tmp_path: Path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", SUPERVISED, str(writer)]
    assert subprocess.run(command, check=False, pass_fds=[writer], timeout=20, capture_output=True).returncode == 1
    os.close(writer)


async def test_followers_start_once_it_is_known_where_their_leader_listens_and_all_must_be_ready():
    commands = Scripted([["lr"]], followers=[["r"], ["r"]])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        assert all((f"worker 0.{index}", "127.0.0.1:7000") in commands.calls for index in (1, 2))
        assert ("worker 0.2", "ready") in recorder.news


@pytest.mark.parametrize("which", ["leader", "follower"])
async def test_when_one_process_of_a_gang_ends_all_of_them_are_started_again(which: str):
    commands = Scripted([["lri", "lr"], ["lr"]], followers=[["ri", "r"], ["ri", "r"]])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        roles = {role.name: role for role in supervisor._roles}
        ended = roles["worker 0" if which == "leader" else "worker 0.2"]
        assert ended._child is not None
        ended._child.signal(signal.SIGKILL)
        for name in ("worker 0", "worker 0.1", "worker 0.2"):
            await recorder.saw(name, "ready", times=2)
        assert recorder.news.count(("worker 1", "ready")) == 1
        assert recorder.news.count(("worker 1.1", "ready")) == 1
        assert recorder.news.count(("worker 0.1", "ready")) == 2


async def test_a_gang_ends_with_its_leader_when_all_is_stopped():
    commands = Scripted([["lr"]], followers=[["r"]])
    async with running(commands) as (supervisor, recorder):
        await supervisor.start()
        await supervisor.stop()
        assert ("worker 0", "worker-0 told") in recorder.news
        assert all(role.task.done() for role in supervisor._roles)
