"""Whatever one client sends, the streams of others go on, and the gateway's memory grows by little more than it got.

The gateway and a scripted worker are processes of their own; the streams are read, and the large inputs sent, by
threads that wait in the kernel. What a stream pauses for is held against the same stream beside nothing.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import from_rpc_error
from moonshard.serving.gateway.grpc_gate import MAX_FIELDS
from tests.rpc.raw_grpc import field
from tests.serving.gateway.conftest import FIXTURE

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
MB = 1_000_000
PAUSE_S = 0.05  # beyond what there is beside nothing
GROWTH, ALLOWED_BYTES = 4, 64 * MB  # times the bytes in flight; and what a gateway takes for its first request anyhow
NUM_TOKENS, PACE_S = 1_500, 0.004
CONTEXTS = (2_000, 262_144)  # tokens


def body_of(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def large_inputs() -> Mapping[str, tuple[str, bytes]]:
    """Each kind of what may be large: the path, and a body of nearly `max_body_bytes`."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    say = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x"] * (6 * MB)}}}
    return {
        "one word": (text, body_of(prompt="a" * (31 * MB))),
        "prose": (text, body_of(prompt="The quick brown fox. " * (31 * MB // 21))),
        "prose to count": ("/tokenize", body_of(prompt="The quick brown fox. " * (31 * MB // 21))),
        "escapes": (text, b'{"prompt":"' + b"\\u6f22" * (5 * MB) + b'"}'),
        "a message": (chat, body_of(messages=[{"role": "user", "content": "word " * (6 * MB)}])),
        "messages": (chat, body_of(messages=say * (31 * MB // 40))),
        "ids": (text, b'{"prompt":[' + b"1," * (15 * MB) + b"1]}"),
        "ids to spell": ("/detokenize", b'{"tokens":[' + b"1," * (15 * MB) + b"1]}"),
        "metadata": (chat, body_of(messages=say, metadata={str(n): "a" for n in range(2 * MB)})),
        "a tool's schema": (chat, body_of(messages=say, tools=[tool])),
        "nesting": (chat, body_of(messages=say)[:-1] + b',"metadata":' + b"[" * (15 * MB) + b"]" * (15 * MB) + b"}"),
        "stops": (text, body_of(prompt="a", stop=["b"] * (6 * MB))),
        "biases": (text, body_of(prompt="a", logit_bias={str(n): 1 for n in range(2 * MB)})),
        "no JSON": (text, b"{" * (31 * MB)),
    }


def large_messages() -> Mapping[str, tuple[str, bytes]]:
    """The same over gRPC."""
    generate, tokenize = "/moonshard.v1.Inference/Generate", "/moonshard.v1.Inference/Tokenize"
    say = b"\x0a\x0a" + b"\x0a\x04user\x12\x02hi"  # of a chat: a message
    schema = pb.Tool(name="f", parameters=json.dumps({"enum": ["x"] * (6 * MB)}))
    small_schema = pb.Tool(name="f", parameters=json.dumps({"enum": ["x"] * 200_000}))
    hi = [pb.ChatMessage(role="user", content="hi")]
    return {
        "gRPC: one word": (generate, pb.GenerateRequest(text="a" * (31 * MB)).SerializeToString()),
        "gRPC: prose to count": (tokenize, pb.TokenizeRequest(text="The quick brown fox. " * MB).SerializeToString()),
        "gRPC: ids": (generate, field(3, field(1, b"\x01" * (31 * MB)))),
        "gRPC: ids one by one": (generate, field(3, b"\x08\x01" * (15 * MB))),
        "gRPC: empty messages": (generate, field(4, b"\x0a\x00" * (15 * MB))),
        "gRPC: as many messages as may be": (generate, field(4, say * (MAX_FIELDS // 3 - 1))),
        "gRPC: stops": (generate, field(2, b"a") + field(6, b"\x1a\x01b" * (10 * MB))),
        "gRPC: what nobody knows": (generate, field(2, b"a") + b"\x98\x06\x01" * (10 * MB)),
        "gRPC: a tool's schema": (generate, chat(hi, schema)),
        "gRPC: a tool's schema as long as it may be": (generate, chat(hi, small_schema)),
        "gRPC: no message": (generate, b"\xff" * (31 * MB)),
    }


def chat(messages: Sequence[pb.ChatMessage], tool: pb.Tool) -> bytes:
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages, tools=[tool])).SerializeToString()


class Deployment:
    """A gateway's process, and what is asked of it."""

    def __init__(self, port: int, grpc_port: int, pid: int):
        self.port, self.grpc_port, self.pid = port, grpc_port, pid

    def send(self, path: str, body: bytes) -> int:
        """The status, once all of the answer is here; of a call over gRPC that which HTTP would have."""
        return self.call(path, body) if path.startswith("/moonshard.v1.") else self.post(path, body)

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
        """Of a stream of tokens, from its first to its last or until it is over."""
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
        """`VmRSS` or `VmHWM`, its peak (proc(5))."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    def beside(self, path: str, body: bytes | None, lasts_s: float) -> tuple[float, float, int]:
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
        if body is not None:
            status = self.send(path, body)
        time.sleep(max(0.2, lasts_s - (time.monotonic() - begun_s)))
        is_over.set()
        for thread in threads:
            thread.join()
        return found["stream"], found["health"], status


@contextmanager
def deployment(context_tokens: int, folder: Path) -> Iterator[Deployment]:
    worker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.serving.gateway.fake_process",
            "both",
            "65" * 16,
            str(context_tokens),
            str(PACE_S),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    address = f"127.0.0.1:{int(worker.stdout.readline())}"
    settings = {"model.path": FIXTURE, "gateway.port": 0, "gateway.grpc_port": 0, "gateway.workers": f'["{address}"]'}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    log = folder / "gateway.log"
    with log.open("wb") as out:
        argv = [sys.executable, "-m", "moonshard.serving.cli", "gateway", *sets]
        gateway = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ)
    try:
        deadline = time.monotonic() + 120
        while "moonshard ready" not in (text := log.read_text()):
            assert gateway.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        port, grpc_port = (
            int(text.split(said)[1].split()[0]) for said in ("http=http://127.0.0.1:", "grpc=127.0.0.1:")
        )
        yield Deployment(port, grpc_port, gateway.pid)
    finally:
        for process in (gateway, worker):
            process.send_signal(signal.SIGKILL)
            process.wait()
        worker.stdout.close()


@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_no_large_input_stops_a_stream_or_fills_the_memory(context_tokens: int, tmp_path: Path):
    faults: list[str] = []
    with deployment(context_tokens, tmp_path) as deployed:
        deployed.beside("", None, 1.0)
        for name, (path, body) in {**large_inputs(), **large_messages()}.items():
            calm_stream, calm_health, _ = deployed.beside("", None, 1.5)
            deployed.forget_peak()
            before = deployed.memory_bytes("VmRSS")
            stream, health, status = deployed.beside(path, body, 1.5)
            grown = deployed.memory_bytes("VmHWM") - before
            told = (
                f"{name}, {len(body) / MB:.0f} MB: {status}; "
                f"stream {stream * 1e3:.0f} ms ({calm_stream * 1e3:.0f} calm), "
                f"health {health * 1e3:.0f} ms ({calm_health * 1e3:.0f} calm), memory +{grown / MB:.0f} MB"
            )
            print(told)  # noqa: T201
            is_slow = stream > calm_stream + PAUSE_S or health > calm_health + PAUSE_S
            if is_slow or grown > GROWTH * len(body) + ALLOWED_BYTES or status == 500:
                faults.append(told)
    assert not faults, "\n".join(faults)
