"""Real processes for the whole run: `moonshard serve` on free ports, so small that it preempts and its slabs fill up.

`cluster` is arranged as a user gets it by default, with a model of random weights: a prefill worker, a decode worker,
Mooncake between them. `aggregated` is the same model in one worker, started by the first test that compares the two.
"""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.client import Client
from tests.dialling import inspect
from tests.sizes import BLOCK_SIZE, SETTINGS

if TYPE_CHECKING:
    from tests.cluster.faults import Fleet

READY_TIMEOUT_S = 180.0
FIXTURE = Path(__file__).parents[1] / "fixtures" / "kimi_k2"
BLOCK_BYTES = 4 * BLOCK_SIZE * (32 + 16) * 4  # layers, tokens, latent and rope features, float32
NUM_SLAB_SLOTS = 48  # fewer than the longest prompts have blocks
QUARANTINE_S = 1.0
OVERRIDES = {
    "mode": "disaggregated",
    "model.path": FIXTURE,
    "gateway.port": 0,
    "gateway.grpc_port": 0,
    "gateway.queue_timeout_s": 50.0,  # where nothing is compiled yet, a place among 15 comes late
    **SETTINGS,
    "kv.slab_bytes": NUM_SLAB_SLOTS * BLOCK_BYTES,
    "kv.quarantine_s": QUARANTINE_S,
    "routing.ttft_slo_s": "none",  # what is asked at once is to be served, however slow the machine
    "routing.local_prefill": "static",  # every prompt is handed over, unless a test says when not
}
AGGREGATED = {"mode": "aggregated"}


@dataclass
class Cluster:
    """A running `moonshard serve`, as its user sees it."""

    process: subprocess.Popen[str]
    http_url: str = ""
    grpc_address: str = ""
    lines: list[str] = field(default_factory=list)  # of stderr

    def client(self) -> Client:
        return Client(self.grpc_address, timeout_s=120)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.http_url, timeout=120)

    def metric(self, name: str, **labels: str) -> float:
        with self.http() as http:
            return metric(http, name, **labels)

    @property
    def workers(self) -> dict[tuple[str, int], str]:
        """Where each worker listened at first, by its command and number. One that is started again on this machine
        listens there too.
        """
        found = (re.search(r"(worker|prefill|decode) (\d+): listening address=(\S+)", line) for line in self.lines)
        return {(m[1], int(m[2])): m[3] for m in found if m}

    def logs(self) -> str:
        return "".join(self.lines)

    def inspect(self, role: str = "decode", index: int = 0) -> link_pb2.Inspection:
        """`role` is the worker's command: `worker` is an aggregated one. RpcError where none answers."""
        return inspect(self.workers[role, index], timeout_s=5)

    def is_as_it_began(self) -> bool:
        """Nothing runs, waits or moves on any worker, and every block, slot and slab cell is free."""
        return all(_is_unused(self.inspect(*worker)) for worker in self.workers)

    def pid(self, role: str, index: int = 0) -> int:
        """The pid of this worker's present process. StopIteration where there is none."""
        port = int(self.workers[role, index].rpartition(":")[2])
        return next(pid for pid in self._children(role) if _listens(pid, port))

    def _children(self, command: str) -> list[int]:
        """The child processes of `serve` that run a command."""
        children = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=False,  # 1: there are none
        )
        rows = [line.split() for line in children.stdout.splitlines()]
        return [int(row[0]) for row in rows if command in row]


def _is_unused(state: link_pb2.Inspection) -> bool:
    load, kv = state.load, state.load.kv_transfer
    return (
        all(
            (partition.free_blocks, partition.free_slots) == (partition.total_blocks, partition.total_slots)
            for partition in state.partitions
        )
        and (load.num_running, load.num_waiting, kv.num_handoffs) == (0, 0, 0)
        and kv.free_slab_slots == kv.total_slab_slots
    )


def _listens(pid: int, port: int) -> bool:
    sockets = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[1].endswith(f":{port:04X}"):  # listening
                sockets.add(f"socket:[{fields[9]}]")
    return any(str(fd.readlink()) in sockets for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())


def start_cluster(*options: str, **overrides: object) -> Cluster:
    argv = [sys.executable, "-m", "moonshard.serving.cli", "serve", *options]
    for key, value in {**OVERRIDES, **overrides}.items():
        argv += ["--set", f"{key}={value}"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    cluster = Cluster(process)
    threading.Thread(target=_collect, args=(process.stderr, cluster.lines), daemon=True).start()
    timer = threading.Timer(READY_TIMEOUT_S, process.kill)
    timer.start()
    assert process.stdout is not None
    ready = process.stdout.readline()
    timer.cancel()
    found = re.search(r"(http://\S+)/v1\s+grpc (\S+)", ready)
    assert found, "".join(cluster.lines)
    cluster.http_url, cluster.grpc_address = found.groups()
    return cluster


def stop_cluster(cluster: Cluster) -> int:
    cluster.process.send_signal(signal.SIGTERM)
    code = cluster.process.wait(timeout=40)
    assert cluster.process.stdout is not None
    cluster.process.stdout.close()
    return code


def _collect(stream, lines: list[str]) -> None:
    with stream:
        for line in stream:
            lines.append(line)  # noqa: PERF402  # line by line, since others read meanwhile


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    """The sum over all samples of a gateway's metric that have these labels."""
    lines = http.get("/metrics").text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and all(w in line for w in wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Polls a condition of another process, which notifies nobody."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def running(*options: str, **overrides: object) -> Iterator[Cluster]:
    """A cluster that is stopped after the block, however the block ends."""
    started = start_cluster(*options, **overrides)
    try:
        yield started
    finally:
        assert stop_cluster(started) == 0


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running() as started:
        yield started


@pytest.fixture(scope="session")
def aggregated() -> Iterator[Cluster]:
    with running(**AGGREGATED) as started:
        yield started


@pytest.fixture(scope="session")
def one_p_two_d(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Fleet"]:
    """Processes that tests kill and restart, all but at once. Each test leaves them complete and as they began."""
    from tests.cluster.faults import running_fleet  # which takes its sizes from here

    with running_fleet(tmp_path_factory.mktemp("fleet"), num_prefill=1, num_decode=2) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def fixture_references() -> Path:
    return FIXTURE
