"""Machines on a network of this process's own: each a namespace, on a bridge that this process is on as well.

`alone` first, so that nothing here touches the network of the machine. A machine's cable can be pulled. Nothing of it
is left once the processes have ended.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.pods.sandbox import Namespaces, plug_in

SUBNET = "10.232.0"
BRIDGE = "br0"
ALONE = "MOONSHARD_TESTS_ALONE"


def alone(module: str, arguments: Sequence[str]) -> None:
    """Goes on as `python -m module` in a new network, unless this process is in one already."""
    if ALONE in os.environ:
        return
    command = ["unshare", "--net", sys.executable, "-m", module, *arguments]
    os.execvpe(command[0], command, {**os.environ, ALONE: "1"})


@dataclass(frozen=True)
class Machine:
    name: str
    address: str
    port: str  # of the bridge, by its name: the other end of the cable
    namespaces: Namespaces

    def command(self, *argv: str) -> list[str]:
        """`argv` as a process of this machine: it becomes the process that is started."""
        return ["nsenter", "--target", str(self.namespaces.process.pid), "--net", *argv]

    def processes(self) -> list[psutil.Process]:
        """What runs here, the oldest first."""
        own = self.namespaces.process.pid
        there = [one for one in psutil.process_iter() if one.pid != own and network_of(one.pid) == network_of(own)]
        return sorted(there, key=lambda one: one.pid)

    def cut(self) -> None:
        """Pulls the cable: whatever is sent is lost, and nobody is told."""
        _ip("link", "set", self.port, "down")

    def heal(self) -> None:
        _ip("link", "set", self.port, "up")


class Network:
    """The bridge, with this process at SUBNET.1."""

    def __init__(self) -> None:
        assert ALONE in os.environ
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        self.machines: dict[str, Machine] = {}

    def add(self, name: str) -> Machine:
        number = 10 + len(self.machines)
        port, address, namespaces = f"port{number}", f"{SUBNET}.{number}", Namespaces.make("")
        plug_in(namespaces, address, port, _run)
        self.machines[name] = Machine(name, address, port, namespaces)
        return self.machines[name]

    def end(self) -> None:
        """Ends what still runs on machines, and these."""
        for machine in self.machines.values():
            for process in machine.processes():
                process.kill()
            machine.namespaces.end()


def network_of(pid: int) -> int:
    """Which network a process is in; -1 for one that is gone."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return -1


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
