"""Whatever one client sends, the streams of others go on, and the gateway's memory grows by little more than it got.

The gateway and a scripted worker are processes of their own; the streams are read, and the large inputs sent, by
threads that wait in the kernel. What a stream pauses for is held against the same stream beside nothing.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from moonshard.rpc.status import from_rpc_error
from moonshard.serving.gateway.pipeline.model import MAX_ENCODING
from tests.serving.gateway.conftest import FIXTURE
from tests.serving.gateway.intake.large_inputs import (
    MB,
    Input,
    Inputs,
    body_of,
    large_bodies,
    large_messages,
    longest_bodies,
    longest_messages,
)

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
PAUSE_S = 0.05  # beyond what there is beside nothing
NUM_TRIES = 3  # of an input: a pause of our own comes every time, one of a busy machine does not
MAX_GROWTH = 4  # times the bytes in flight
ALLOWED_BYTES = 64 * MB  # what a gateway takes for its first request anyhow
TOKENIZER_BYTES = 190  # for each of a text while it is encoded: Hugging Face's, and not ours to bound
NUM_AT_ONCE, BUDGET_BYTES = 50, 64 * MB
NUM_TOKENS, PACE_S = 1_500, 0.004
CONTEXTS = (2_000, 262_144)  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one input did to what ran beside it."""

    told: str
    status: int
    is_slow: bool
    grown_bytes: int


class Deployment:
    """A gateway's process, and what is asked of it."""

    def __init__(self, port: int, grpc_port: int, pid: int):
        self.port, self.grpc_port, self.pid = port, grpc_port, pid

    def send(self, sent: Input) -> int:
        """The HTTP status once the whole answer is here; for gRPC, the status that HTTP would have had."""
        return (self.call if sent.path.startswith("/moonshard.v1.") else self.post)(sent.path, sent.body)

    def call(self, path: str, message: bytes) -> int:
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            try:
                for _ in channel.unary_stream(path)(message):
                    pass
                return 200
            except grpc.RpcError as error:
                return from_rpc_error(error).http_status

    def post(self, path: str, body: bytes) -> int:
        with socket.create_connection(("127.0.0.1", self.port), timeout=300) as connection:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            with contextlib.suppress(OSError):  # answered before all was sent
                connection.sendall(head.encode() + body)
            answer = connection.recv(1 << 16)
            return int(answer.split()[1]) if answer else 0

    def longest_pause_s(self, is_over: threading.Event) -> float:
        """The longest pause in a stream of tokens, from its first to its last or until it is over."""
        body = body_of(prompt=[1, 2, 3], max_tokens=NUM_TOKENS, ignore_eos=True, stream=True)
        longest, last = 0.0, None
        with socket.create_connection(("127.0.0.1", self.port), timeout=300) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            while not is_over.is_set() and (part := connection.recv(1 << 16)) and b"[DONE]" not in part:
                now = time.monotonic()
                longest, last = max(longest, now - (last or now)), now
        return longest

    def slowest_health_s(self, is_over: threading.Event) -> float:
        slowest = 0.0
        while not is_over.is_set():
            begun_s = time.monotonic()
            with socket.create_connection(("127.0.0.1", self.port), timeout=300) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert b"200" in connection.recv(1 << 16)
            slowest = max(slowest, time.monotonic() - begun_s)
            is_over.wait(0.02)
        return slowest

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def memory_bytes(self, name: str) -> int:
        """The value of `VmRSS`, or of `VmHWM`, its peak (proc(5))."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    def measure(self, name: str, sent: Input) -> Measured:
        calm_stream, calm_health, _ = self.beside(None, 1.5)
        self.forget_peak()
        before = self.memory_bytes("VmRSS")
        stream, health, status = self.beside(sent, 1.5)
        grown = self.memory_bytes("VmHWM") - before
        told = (
            f"{name}, {len(sent.body) / MB:.1f} MB: {status}; "
            f"stream {stream * 1e3:.0f} ms ({calm_stream * 1e3:.0f} calm), "
            f"health {health * 1e3:.0f} ms ({calm_health * 1e3:.0f} calm), memory +{grown / MB:.0f} MB"
        )
        print(told)  # noqa: T201
        is_slow = stream > calm_stream + PAUSE_S or health > calm_health + PAUSE_S
        return Measured(told=told, status=status, is_slow=is_slow, grown_bytes=grown)

    def beside(self, sent: Input | None, lasts_s: float) -> tuple[float, float, int]:
        """The longest pause of a stream, the slowest `/health`, and the status of what was sent beside them."""
        is_over, found, status = threading.Event(), {}, 0
        watches = {"stream": self.longest_pause_s, "health": self.slowest_health_s}
        threads = [
            threading.Thread(target=lambda name=name, watch=watch: found.update({name: watch(is_over)}))
            for name, watch in watches.items()
        ]
        for thread in threads:
            thread.start()
        begun_s = time.monotonic()
        time.sleep(0.3)  # of the stream alone: the length of a measurement, not a wait for something
        if sent is not None:
            status = self.send(sent)
        time.sleep(max(0.2, lasts_s - (time.monotonic() - begun_s)))
        is_over.set()
        for thread in threads:
            thread.join()
        return found["stream"], found["health"], status


@contextmanager
def deployment(context_tokens: int, folder: Path, **gateway: object) -> Iterator[Deployment]:
    """A deployment; `gateway` holds the gateway's keys."""
    script = ["-m", "tests.serving.gateway.fake_process", "both", "65" * 16, str(context_tokens), str(PACE_S)]
    worker = subprocess.Popen([sys.executable, *script], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    keys = {"port": 0, "grpc_port": 0, "workers": f'["127.0.0.1:{int(worker.stdout.readline())}"]', **gateway}
    settings = {"model.path": FIXTURE, **{f"gateway.{key}": value for key, value in keys.items()}}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    log = folder / "gateway.log"
    with log.open("wb") as out:
        argv = [sys.executable, "-m", "moonshard.serving.cli", "gateway", *sets]
        gateway_process = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ)
    try:
        deadline = time.monotonic() + 120
        while "moonshard ready" not in (text := log.read_text()):
            assert gateway_process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        port, grpc_port = (
            int(text.split(said)[1].split()[0]) for said in ("http=http://127.0.0.1:", "grpc=127.0.0.1:")
        )
        yield Deployment(port, grpc_port, gateway_process.pid)
    finally:
        for process in (gateway_process, worker):
            process.send_signal(signal.SIGKILL)
            process.wait()
        worker.stdout.close()


def longest(context_tokens: int) -> Inputs:
    return {**longest_bodies(context_tokens), **longest_messages(context_tokens)}


def most_growth(sent: Input, in_flight: int, num_texts: int) -> int:
    return ALLOWED_BYTES + MAX_GROWTH * in_flight + TOKENIZER_BYTES * num_texts * sent.num_text_bytes


@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_no_large_input_stops_a_stream_or_fills_the_memory(context_tokens: int, tmp_path: Path):
    faults: list[str] = []
    served = longest(context_tokens)
    with deployment(context_tokens, tmp_path) as deployed:
        deployed.beside(None, 1.0)
        for name, sent in {**served, **large_bodies(), **large_messages()}.items():
            must_succeed = name in served and context_tokens == max(CONTEXTS)
            most = most_growth(sent, sent.bytes_in_flight() if name in served else len(sent.body), 1)
            tries = [deployed.measure(name, sent)]
            while tries[-1].is_slow and len(tries) < NUM_TRIES:
                tries.append(deployed.measure(name, sent))
            is_wrong = any(one.status == 500 or (one.status != 200 and must_succeed) for one in tries)
            if tries[-1].is_slow or is_wrong or any(one.grown_bytes > most for one in tries):
                faults += [one.told for one in tries]
    assert not faults, "\n".join(faults)


def test_many_of_the_longest_at_once_fill_no_more_than_what_may_be_in_flight(tmp_path: Path):
    """A body counts with what is made of it, so that the budget bounds the memory however many come."""
    faults: list[str] = []
    limits = {"max_bytes_in_flight": BUDGET_BYTES, "max_body_bytes": BUDGET_BYTES // 2}
    with deployment(max(CONTEXTS), tmp_path, **limits) as deployed:
        for name, sent in longest(max(CONTEXTS)).items():
            deployed.send(sent)
            deployed.forget_peak()
            before = deployed.memory_bytes("VmRSS")
            with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                statuses = Counter(pool.map(deployed.send, [sent] * NUM_AT_ONCE))
            grown = deployed.memory_bytes("VmHWM") - before
            told = (
                f"{name}, {NUM_AT_ONCE} of {len(sent.body) / MB:.1f} MB: {dict(statuses)}, memory +{grown / MB:.0f} MB"
            )
            print(told)  # noqa: T201
            in_flight = min(BUDGET_BYTES, NUM_AT_ONCE * sent.bytes_in_flight())
            is_served = statuses[200] > 0 and not statuses.keys() - {200, 429}
            if not is_served or grown > most_growth(sent, in_flight, MAX_ENCODING):
                faults.append(told)
            assert deployed.send(sent) == 200  # all was given back
    assert not faults, "\n".join(faults)
