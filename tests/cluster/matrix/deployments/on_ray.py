"""The same on a Ray cluster whose nodes have a machine each: `moonshard serve --launcher ray`, with its one gateway.

A node that was ended is started again by whoever measures. Ray's head, and the gateway, are where this process is.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil

from moonshard.rpc import link_pb2
from moonshard.rpc.addresses import host_port
from tests.cluster.conftest import wait_until
from tests.cluster.faults import READY_TIMEOUT_S
from tests.cluster.gangs.ray_nodes import SOON
from tests.cluster.matrix.deployments.commands import PORTS
from tests.cluster.matrix.deployments.machines import SUBNET, Machine, Network, network_of
from tests.dialling import inspect

HEAD, RAY_PORT = f"{SUBNET}.1", 6379
NODES, CPUS = ("Ray node 0", "Ray node 1", "Ray node 2"), 3  # a gang of two fits on each, and no second one
RAY_NODE = "Ray node"  # the one that has the first worker


class OnRay:
    """As `Apart` is one. Workers are known by their addresses, and that of a worker changes as it moves."""

    gateways = ("gateway",)
    # A node that was cut off has its workers back for a while, until those that were started instead are there: seen
    # to take 14 s from when it was noticed.
    steady_s = 20.0

    def __init__(self, settings: Mapping[str, object], log_path: Path) -> None:
        self.log_path = log_path
        self._settings = {**settings, **PORTS, "gateway.host": HEAD}
        del self._settings["gateway.registry_port"]
        self._network = Network()
        self._nodes = {name: self._network.add(name) for name in NODES}
        self._num_workers = int(str(settings["decode.replicas"]))

    @contextmanager
    def running(self) -> "Iterator[OnRay]":
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True))
            self._log = stack.enter_context(self.log_path.open("wb"))
            self._environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
            Path(folder, "ray").mkdir()  # Ray writes into this folder of RAY_TMPDIR, and makes it only on some ways
            stack.callback(self._network.end)
            stack.callback(_end_children)
            self._start_ray(
                "--head",
                f"--port={RAY_PORT}",
                "--num-cpus=0",
                "--include-dashboard=false",
                f"--system-config={json.dumps(SOON)}",
            )
            for node in self._nodes.values():
                self._start_node(node)
            argv = [sys.executable, "-m", "moonshard.serving.cli", "serve", "--launcher", "ray"]
            argv += ["--ray-address", host_port(HEAD, RAY_PORT)]
            argv += [word for key, value in self._settings.items() for word in ("--set", f"{key}={value}")]
            serve = subprocess.Popen(argv, env=self._environment, stdout=self._log, stderr=self._log)
            stack.callback(serve.wait, 60)
            stack.callback(serve.terminate)
            assert wait_until(lambda: self.is_whole() or serve.poll() is not None, READY_TIMEOUT_S), self.log()
            assert serve.poll() is None, self.log()
            yield self

    def _start_ray(self, *options: str, on: Machine | None = None) -> None:
        address = HEAD if on is None else on.address
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address}", *options]
        argv += ["--disable-usage-stats"]
        argv = argv if on is None else on.command(*argv)
        subprocess.run(argv, env=self._environment, stdout=self._log, stderr=self._log, check=True)

    def _start_node(self, node: Machine) -> None:
        self._start_ray(f"--address={host_port(HEAD, RAY_PORT)}", f"--num-cpus={CPUS}", on=node)

    # ---- what is there

    @property
    def leaders(self) -> list[str]:
        return list(self.states("gateway"))

    def machine(self, name: str) -> Machine:
        del name
        host = self.leaders[0].rpartition(":")[0]
        return next(node for node in self._nodes.values() if node.address == host)

    def worker_of(self, process: str) -> str:
        del process
        return self.leaders[0]

    def url(self, gateway: str) -> str:
        del gateway
        return f"http://{HEAD}:{PORTS['gateway.port']}"

    def states(self, gateway: str, timeout_s: float = 5.0) -> dict[str, str]:
        return httpx.get(f"{self.url(gateway)}/health", timeout=timeout_s).json()["workers"]

    def num_storing(self) -> int:
        return 0

    def is_whole(self) -> bool:
        try:
            states = self.states("gateway")
        except (httpx.TransportError, ValueError, KeyError):
            return False
        return len(states) == self._num_workers and set(states.values()) == {"ready"}

    def inspect(self, worker: str) -> link_pb2.Inspection:
        return inspect(worker, timeout_s=5)

    def restore(self, machine: Machine) -> None:
        """Ray forgets a node that it has lost: whatever is left of it ends, and it joins anew."""
        for process in machine.processes():
            process.kill()
        self._start_node(machine)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-6000:]


def _end_children() -> None:
    """Ray's processes leave the one that has started them; those here are in this process's network."""
    for process in psutil.process_iter():
        if process.pid != os.getpid() and network_of(process.pid) == network_of(os.getpid()):
            process.kill()
