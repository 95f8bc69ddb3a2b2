"""A deployment of real processes, each started by itself, that a test stops, kills, cuts off and starts again.

Unlike the cluster of `conftest`, which is one `moonshard serve`, every process here has its own pid, address and log, a
killed worker stays away until the test starts it again, and the gateway can be told any address. What clients ask of it
is in `streams`.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.client import Client
from tests import sizes
from tests.cluster.conftest import FIXTURE, metric, wait_until
from tests.dialling import inspect

READY_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 40.0
QUARANTINE_S = 1.0
HOLD_BYTES = ("01", "08")  # established, and closed by the peer: states of a connection in /proc/net/tcp
FAILOVER_WAIT_S = 1.5  # nothing here restarts a worker but tests: who waits for one waits in vain
SILENCE_S = 3.0
# Quarantine begins when the link's loss is seen, and ends on a tick of the worker.
AS_IT_BEGAN_WITHIN_S = QUARANTINE_S + 10.0
SETTINGS: Mapping[str, object] = {
    "model.path": FIXTURE,
    **sizes.SETTINGS,
    "gateway.port": 0,
    "gateway.grpc_port": 0,
    "gateway.queue_timeout_s": 15.0,
    "gateway.worker_silence_s": SILENCE_S,
    "prefill.port": 0,
    "decode.port": 0,
    "kv.quarantine_s": QUARANTINE_S,
    "kv.lease_s": 20.0,
    "kv.transfer_timeout_s": 2.0,
    "routing.local_prefill": "static",  # every prompt is handed over, unless a test says when not
}
GANGS: Mapping[str, object] = {  # each worker is two processes
    "prefill.processes": 2,
    "prefill.mesh.tensor": 2,
    "decode.processes": 2,
    "decode.mesh.data": 2,
}


@dataclass
class Process:
    """One moonshard process. `role` is the command that runs it; one that leads a gang has the others with it."""

    name: str
    role: str
    settings: dict[str, object]
    log_path: Path
    options: Sequence[str] = ()  # of the command
    popen: subprocess.Popen[bytes] | None = None
    exit_codes: list[int] = field(default_factory=list)
    followers: list["Process"] = field(default_factory=list)

    def start(self) -> None:
        """Returns at once, or once a gang's leader listens."""
        argv = [sys.executable, "-m", "moonshard.serving.cli", self.role, *self.options]
        for key, value in self.settings.items():
            argv += ["--set", f"{key}={value}"]
        with self.log_path.open("wb") as log:  # the log is that of the present process
            self.popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if not self.options and (num_members := int(str(self.settings.get(f"{self.role}.processes", 1)))) > 1:
            self.wait_for("moonshard listening")
            self.followers = [self._follower(index) for index in range(1, num_members)]

    def _follower(self, index: int) -> "Process":
        options = ("--member", str(index), "--leader", self.address)
        log_path = self.log_path.with_suffix(f".{index}.log")
        follower = Process(f"{self.name}.{index}", self.role, self.settings, log_path, options)
        follower.start()
        return follower

    @property
    def members(self) -> Sequence["Process"]:
        """It, and who follows it."""
        return self, *self.followers

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.popen is not None, f"{self.name} was never started"
        return self.popen

    @property
    def is_alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def said(self, name: str) -> str:
        """The address that the process printed."""
        found = re.search(rf"moonshard listening.*\b{name}=(\S+)", self.log())
        assert found, f"{self.name} does not listen:\n{self.log()}"
        return found.group(1)

    @property
    def address(self) -> str:
        return self.said("address")

    def wait_for(self, text: str) -> None:
        """Waits until the log contains it; fails if the process ends before."""
        is_said = wait_until(lambda: text in self.log() or not self.is_alive, READY_TIMEOUT_S)
        assert is_said, f"{self.name} does not say {text!r}:\n{self.log()}"
        assert text in self.log(), f"{self.name} ended:\n{self.log()}"

    def signal(self, number: int) -> None:
        self.running.send_signal(number)

    def kill(self) -> None:
        """Kills at once, whether it is stopped or not."""
        self.signal(signal.SIGKILL)
        self.exit_codes.append(self.running.wait(EXIT_TIMEOUT_S))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the process for as long as the block runs; it may be killed meanwhile."""
        self.signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.running.pid}/stat")
        assert wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", 5)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Asks it to end in order; returns its exit code, or that of a follower which ended otherwise."""
        self.signal(signal.SIGTERM)
        return max((member.running.wait(EXIT_TIMEOUT_S) for member in self.members), key=abs)

    def restart(self) -> None:
        """Starts it again at its address; returns when it serves."""
        if self.role != "gateway":
            self.settings[f"{self.role}.port"] = self.address.rpartition(":")[2]
        self.start()
        self.wait_for("moonshard ready")


@dataclass
class Fleet:
    """Workers by name ("decode 0") and the gateway that serves over them."""

    workers: dict[str, Process]
    gateway: Process
    credentials: grpc.ChannelCredentials | None = None  # to ask the workers themselves

    def __getitem__(self, name: str) -> Process:
        return self.gateway if name == "gateway" else self.workers[name]

    @property
    def processes(self) -> list[Process]:
        return [*self.workers.values(), self.gateway]

    def client(self) -> Client:
        return Client(self.gateway.said("grpc"), timeout_s=120)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.gateway.said("http"), timeout=120)

    def metric(self, name: str, **labels: str) -> float:
        with self.http() as http:
            return metric(http, name, **labels)

    def label_of(self, worker: Process) -> str:
        """The worker's label in the gateway's metrics of requests: its place among `gateway.workers`."""
        return str(list(self.workers.values()).index(worker))

    def restore(self) -> None:
        """Start again what is not there, and wait until the gateway has a link to every worker."""
        gone = [process for process in self.processes if not process.is_alive]
        for process in gone:
            process.restart()
        assert wait_until(self._is_linked, 30), self.logs()

    def _is_linked(self) -> bool:
        return self.metric("moonshard_worker_up") == len(self.workers)

    def assert_as_it_began(self) -> None:
        """Every pool, slab, slot and count of every running worker is as it began."""
        wait_until(lambda: not self.remains(), AS_IT_BEGAN_WITHIN_S)
        assert not self.remains(), f"{self.remains()}\n{self.logs()}"

    def remains(self) -> dict[str, str]:
        """What workers still hold, by worker."""
        alive = [worker for worker in self.workers.values() if worker.is_alive]
        held = {worker.name: what_is_held(inspect(worker.address, self.credentials)) for worker in alive}
        return {name: what for name, what in held.items() if what}

    def logs(self) -> str:
        return logs_of(self.processes)


def logs_of(processes: Sequence[Process]) -> str:
    members = (member for process in processes for member in process.members)
    return "\n".join(f"--- {member.name}\n{member.log()[-6000:]}" for member in members)


def unread_bytes(process: Process) -> int:
    """What peers have written to its KV plane and it has not read: that lands when it goes on, come what may."""
    pid, own_port = process.running.pid, f":{int(process.address.rpartition(':')[2]):04X}"
    sockets = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return sum(
        int(queues.rpartition(":")[2], 16)
        for _, local, _, state, queues, *_, inode in (row[:10] for row in rows)
        if state in HOLD_BYTES and f"socket:[{inode}]" in sockets and not local.endswith(own_port)
    )


def is_serving(address: str) -> bool:
    """Whether the process reports health "serving"; one that does not answer is not."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        check = stub.Check  # pyright: ignore[reportAttributeAccessIssue]  # typeshed leaves it out
        try:
            return check(health_pb2.HealthCheckRequest(), timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        except grpc.RpcError:
            return False


def what_is_held(inspection: link_pb2.Inspection) -> str:
    """What a worker still holds; empty when it is as it began, apart from counters."""
    held = [
        f"partition: {state}"
        for state in inspection.partitions
        if (state.free_blocks, state.free_slots) != (state.total_blocks, state.total_slots)
    ]
    load, kv = inspection.load, inspection.load.kv_transfer
    if load.num_running or load.num_waiting or any(load.queued_tokens) or any(load.active_tokens):
        held.append(f"load: {load}")
    if kv.num_handoffs or kv.free_slab_slots != kv.total_slab_slots:
        held.append(f"kv: {kv}")
    return "; ".join(held)


@contextmanager
def running_fleet(
    folder: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    through: Callable[[str], str] = lambda address: address,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Fleet]:
    """All processes serve inside the block, and are gone after it. `settings` go before `SETTINGS`.

    `through`: what the gateway is told instead of a worker's address.
    """
    routing = {"routing.failover_wait_s": FAILOVER_WAIT_S, "routing.ttft_slo_s": "none"}
    chosen = {**SETTINGS, **routing, **settings}
    names = [("prefill", i) for i in range(num_prefill)] + [("decode", i) for i in range(num_decode)]
    workers = {
        f"{role} {i}": Process(f"{role} {i}", role, dict(chosen), folder / f"{role}_{i}.log") for role, i in names
    }
    gateway = Process("gateway", "gateway", dict(chosen), folder / "gateway.log")
    fleet = Fleet(workers, gateway)
    try:
        for worker in workers.values():
            worker.start()
        for worker in workers.values():
            worker.wait_for("moonshard listening")
        addresses = [through(worker.address) for worker in workers.values()]
        gateway.settings["gateway.workers"] = "[" + ", ".join(f'"{address}"' for address in addresses) + "]"
        gateway.start()
        for process in fleet.processes:
            process.wait_for("moonshard ready")
        gateway.settings |= {
            "gateway.port": gateway.said("http").rpartition(":")[2],
            "gateway.grpc_port": gateway.said("grpc").rpartition(":")[2],
        }
        # A gateway is ready with one worker that decodes; tests ask for what takes all of them.
        assert wait_until(fleet._is_linked, READY_TIMEOUT_S), fleet.logs()
        yield fleet
    finally:
        end_processes(fleet.processes)


def end_processes(processes: Sequence[Process]) -> None:
    """Kills what runs, and waits for it."""
    members = [member for process in processes for member in process.members]
    for member in members:
        if member.is_alive:
            with suppress(ProcessLookupError):
                os.kill(member.running.pid, signal.SIGKILL)
    for member in members:
        if member.popen is not None:
            member.popen.wait(EXIT_TIMEOUT_S)


class Lateness:
    """The longest delay of the gateway's health answer while the block runs: the noise of this machine.

    The control of every bound on how long something takes.
    """

    def __init__(self, fleet: Fleet):
        self.longest_s = 0.0
        self._fleet = fleet
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        with self._fleet.http() as http:
            while not self._is_over.wait(0.05):
                begun_s = time.monotonic()
                http.get("/health")
                self.longest_s = max(self.longest_s, time.monotonic() - begun_s)

    def __enter__(self) -> "Lateness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
