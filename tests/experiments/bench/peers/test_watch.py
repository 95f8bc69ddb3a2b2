"""Foreign processor time: what is not the server's nor the client's, and which processes are the server's."""

import asyncio
import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from moonshard.experiments.bench.peers import watch
from moonshard.experiments.bench.peers.watch import (
    GRACE_S,
    MAX_BUSY_S,
    Window,
    cpu_of_trees_s,
    listeners,
    settled,
    tree,
    watched,
)

SPIN_S = 0.3
# Spins for so long by its own clock, says so, and waits to be told to end.
SPINNING = f"""
import sys, time
while time.process_time() < {SPIN_S}:
    pass
print("done", flush=True)
sys.stdin.read()
"""


@contextmanager
def spinning() -> Iterator[subprocess.Popen[str]]:
    """A process that has spun; it is there until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", SPINNING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        yield child
        child.communicate()


@pytest.mark.parametrize(("busy_s", "server_s", "foreign_s"), [(2.0, 1.9, 0.1), (2.0, 0.0, 2.0), (1.0, 1.2, 0.0)])
def test_foreign_is_all_time_but_the_servers_and_the_clients(monkeypatch, busy_s, server_s, foreign_s):
    busy, server = iter((10.0, 10.0 + busy_s)), iter((5.0, 5.0 + server_s))
    monkeypatch.setattr(watch, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(watch, "cpu_of_trees_s", lambda roots: next(server))
    monkeypatch.setattr(watch.time, "process_time", lambda: 1.0)
    with watched([1]) as window:
        pass
    assert window.foreign_s == pytest.approx(foreign_s)


def test_another_process_is_foreign_unless_it_is_the_server():
    with watched([]) as window, spinning():
        pass
    assert window.foreign_s >= SPIN_S - GRACE_S
    with spinning() as child:
        assert cpu_of_trees_s([child.pid]) == pytest.approx(cpu_of_trees_s([child.pid, child.pid]))
        assert cpu_of_trees_s([child.pid]) >= SPIN_S - GRACE_S


def test_a_sample_waits_until_nobody_works(monkeypatch):
    readings = iter((0.0, 0.2, 0.2, 0.4, 0.4, 0.4 + MAX_BUSY_S / 2))  # of two clocks for each moment
    monkeypatch.setattr(watch, "_busy_s", lambda: next(readings))
    monkeypatch.setattr(watch, "IDLE_S", 0.0)
    asyncio.run(settled())
    assert list(readings) == []


def test_on_a_machine_that_is_never_idle_a_sample_begins_all_the_same(monkeypatch):
    busy = itertools.count()
    monkeypatch.setattr(watch, "_busy_s", lambda: float(next(busy)))
    monkeypatch.setattr(watch, "IDLE_S", 0.001)
    monkeypatch.setattr(watch, "MAX_SETTLING_S", 0.05)
    asyncio.run(settled())
    assert next(busy) >= 4


def test_a_servers_children_are_its_own():
    with spinning() as child:
        assert child.pid in {process.pid for process in tree([psutil.Process().pid])}
    assert tree([child.pid]) == []


def test_a_little_is_no_disturbance():
    assert not Window(elapsed_s=0.01, foreign_s=0.02).is_disturbed
    assert Window(elapsed_s=0.01, foreign_s=0.05).is_disturbed
    assert Window(elapsed_s=10.0, foreign_s=20.0).is_disturbed


def test_a_port_leads_to_the_process_that_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert listeners(f"http://127.0.0.1:{port}/v1") == [psutil.Process().pid]
    assert listeners(f"http://127.0.0.1:{port}") == []
    assert listeners(f"http://somewhere-else:{port}") == []
