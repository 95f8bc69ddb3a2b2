"""One cluster of real processes for the whole run: `moonshard serve` on free ports, small enough that it preempts."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.client import Client

READY_TIMEOUT_S = 120.0
NUM_BLOCKS = 128
BLOCK_SIZE = 16
MAX_SLOTS = 4
OVERRIDES = {
    "mode": "aggregated",
    "gateway.port": 0,
    "gateway.grpc_port": 0,
    "gateway.queue_timeout_s": 20.0,
    "model.max_context_tokens": 2000,
    "prefill.chunk_tokens": 64,
    "decode.max_slots": MAX_SLOTS,
    "kv.block_size": BLOCK_SIZE,
    "kv.num_blocks": NUM_BLOCKS,
}


@dataclass
class Cluster:
    """A running `moonshard serve`, as its user sees it."""

    process: subprocess.Popen[str]
    http_url: str = ""
    grpc_address: str = ""
    lines: list[str] = field(default_factory=list)  # of stderr

    def client(self) -> Client:
        return Client(self.grpc_address, timeout_s=60)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.http_url, timeout=60)

    def worker_address(self) -> str:
        """Where the worker listens now: it says so on every start."""
        found = [m for line in self.lines if (m := re.search(r"worker 0.*address=(\S+)", line))]
        return found[-1].group(1)

    def inspect(self) -> link_pb2.Inspection:
        with grpc.insecure_channel(self.worker_address()) as channel:
            return link_pb2_grpc.WorkerStub(channel).Inspect(link_pb2.InspectRequest(), timeout=5)

    def is_as_it_began(self) -> bool:
        state = self.inspect().partitions[0]
        return (state.free_blocks, state.free_slots) == (NUM_BLOCKS, MAX_SLOTS)


def start_cluster(**overrides: object) -> Cluster:
    argv = [sys.executable, "-m", "moonshard.serving.cli", "serve"]
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


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Polls: the condition lies in another process, which tells nobody."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    started = start_cluster()
    yield started
    assert stop_cluster(started) == 0


@pytest.fixture(scope="session")
def fixture_references() -> Path:
    return Path(__file__).parents[1] / "fixtures" / "kimi_k2"
