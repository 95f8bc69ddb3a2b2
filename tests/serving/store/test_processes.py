"""Mooncake's two processes: how they start, fail to, and end."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from moonshard.kv.store.mooncake.answers import answers
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.serving.store.ports import StorePorts
from moonshard.serving.store.processes import MooncakeProcesses, StoreSettings

pytestmark = pytest.mark.xdist_group("mooncake")
LIMIT_S = 30.0
SETTINGS = StoreSettings(segment_bytes=64 * 1024 * 1024)


@pytest.fixture
def running() -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(StorePorts.free(), SETTINGS)
    processes.start()
    yield processes
    processes.stop()


def test_processes_that_serve_log_nothing():
    lines = list[str]()
    processes = MooncakeProcesses(StorePorts.free(), SETTINGS, on_line=lines.append)
    processes.start()
    assert len(processes.pids) == 2
    processes.stop()
    assert processes.pids == ()
    assert lines == []


def test_processes_that_cannot_start_say_why_and_leave_none_behind(running: MooncakeProcesses):
    ports = StorePorts.free()
    taken = StorePorts(master=ports.master, metrics=running.ports.metrics, client=ports.client)
    processes = MooncakeProcesses(taken, SETTINGS)
    with pytest.raises(StoreUnavailable, match=r"mooncake_master ended with 1: .*Address already in use"):
        processes.start()
    assert processes.pids == ()
    taken = StorePorts(master=ports.master, metrics=ports.metrics, client=running.ports.client)
    processes = MooncakeProcesses(taken, SETTINGS)
    with pytest.raises(StoreUnavailable, match="something answers at"):
        processes.start()
    assert processes.pids == ()
    assert not answers(f"127.0.0.1:{ports.master}", timeout_s=0.2)


@pytest.mark.parametrize("patience_s", [0.0, LIMIT_S])
def test_processes_end_though_they_are_stopped(running: MooncakeProcesses, patience_s: float):
    """At once killed, or, since they are woken, in order."""
    assert running.client.pid
    os.kill(running.client.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, running.client.pid, os.WSTOPPED | os.WNOWAIT)
    began_s = time.perf_counter()
    running.stop(patience_s)
    assert running.pids == ()
    assert time.perf_counter() - began_s < LIMIT_S / 2


def test_without_the_package_they_say_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(StoreUnavailable, match="mooncake-transfer-engine"):
        MooncakeProcesses(StorePorts(master=1, metrics=2, client=3), SETTINGS)
