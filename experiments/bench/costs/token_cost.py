"""The processor time that a token costs the gateway's process, beside its libraries without a gateway.

Both read the link of a worker without a model that makes a step every 4 ms, and write each token to its client by
itself, over gRPC or as a server-sent event. What the bare fronts take is grpc.aio's, uvicorn's and the kernel's; the
rest is ours. They take turns, under the same streams.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from moonshard.experiments.bench.costs.gateway_cost import PROMPT, gateway_process, scripted_worker
from moonshard.experiments.bench.serving.streams import ask_grpc
from moonshard.experiments.common.grid import Grid, number
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.server import ServerFailed, cpu_s
from moonshard.rpc.client import AsyncClient
from moonshard.serving.config.cluster_key import key_file_of
from moonshard.serving.config.keys import Config

STEP_S = 0.004
NUM_STREAMS = (8, 16)
NUM_TOKENS = 200  # of a stream
END_BYTES = 64  # of an answer, in which `[DONE]` stands
BARE, GATEWAY = "bare", "gateway"
WIRES = ("gRPC", "HTTP")
COLUMNS = ("streams", "wire", "bare, us", "gateway, us", "ours, us", "gateway / bare")


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """A process that serves streams."""

    pid: int
    grpc: str
    http: str
    model: str


type Ask = Callable[[], Awaitable[int]]  # the number of tokens that came


def measure_tokens(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Processor time per token of both, over both wires. ServerFailed if one does not start."""
    with (
        scripted_worker(config, environment, step_s=STEP_S) as worker,
        _bare(config, worker, environment) as bare,
        gateway_process(config, worker, environment) as process,
    ):
        pid, grpc, http = process.running.pid, process.said("grpc"), process.said("http")
        gateway = Front(pid=pid, grpc=grpc, http=http, model=config.model.name)
        return uvloop.run(_take_turns({BARE: bare, GATEWAY: gateway}, plan))


@contextmanager
def _bare(config: Config, worker: str, environment: Mapping[str, str]) -> Iterator[Front]:
    key_file = str(key_file_of(config, os.environ))
    argv = [sys.executable, "-m", "moonshard.experiments.bench.costs.bare_fronts", key_file, worker]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None  # it was asked for
        said = process.stdout.readline().split()
        if len(said) != 2:
            raise ServerFailed("the bare fronts ended before they were ready")
        grpc, http = said
        yield Front(pid=process.pid, grpc=grpc, http=http, model="bare")
        # leaving closes its input, which is what it ends by


async def _take_turns(fronts: Mapping[str, Front], plan: Plan) -> list[Measurement]:
    """The first round warms up, and is not counted."""
    samples: dict[str, list[float]] = {}
    for index in range(plan.token_rounds + 1):
        for num_streams in NUM_STREAMS:
            for wire in WIRES:
                for what, front in fronts.items():
                    spent_us = await _spent_us(front, wire, num_streams, plan.token_s)
                    if index:
                        samples.setdefault(_name(what, wire, num_streams), []).append(spent_us)
    return [Measurement(level="gateway", name=name, unit="us", samples=tuple(us)) for name, us in samples.items()]


async def _spent_us(front: Front, wire: str, num_streams: int, duration_s: float) -> float:
    """Processor time per token with so many streams, each followed by another until the time is over."""
    async with AsyncClient(front.grpc) as client:

        async def over_grpc() -> int:
            return len((await ask_grpc(client, PROMPT, NUM_TOKENS)).arrivals_ns)

        async def over_http() -> int:
            return await _ask_http(front)

        ask, end_s = over_grpc if wire == "gRPC" else over_http, time.perf_counter() + duration_s
        begun_s = cpu_s(front.pid)
        num_tokens = sum(await asyncio.gather(*(_one_after_another(ask, end_s) for _ in range(num_streams))))
        return (cpu_s(front.pid) - begun_s) / num_tokens * 1e6


async def _one_after_another(ask: Ask, end_s: float) -> int:
    num_tokens = 0
    while time.perf_counter() < end_s:
        num_tokens += await ask()
    return num_tokens


async def _ask_http(front: Front) -> int:
    """The number of tokens. Looks at the first and the last bytes alone: a client that parsed them all would take the
    cores from what is measured. ServerFailed if the answer is none.
    """
    host, _, port = front.http.removeprefix("http://").rpartition(":")
    asked = {"model": front.model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    status, end = await reader.readline(), b""
    while data := await reader.read(1 << 16):
        end = (end + data)[-END_BYTES:]
    writer.close()
    if b" 200 " not in status or b"[DONE]" not in end:
        raise ServerFailed(f"a stream of the bench was answered with {status.decode().strip()}, and did not end")
    return NUM_TOKENS


def _name(what: str, wire: str, num_streams: int) -> str:
    return f"processor time per token, {wire}, {num_streams} streams, {what}"


def token_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """A row for each number of streams and wire."""
    del plan
    p50 = {one.name: one.quantile(0.5) for one in measurements if one.level == "gateway"}
    rows = []
    for num_streams in NUM_STREAMS:
        for wire in WIRES:
            bare, gateway = (p50.get(_name(what, wire, num_streams)) for what in (BARE, GATEWAY))
            if bare is None or gateway is None:
                continue
            told = (number(bare), number(gateway), number(gateway - bare), f"{gateway / bare:.2f}")
            rows.append((str(num_streams), wire, *told))
    notes = (
        f"Tokens: processor time of all threads of a process, a token a stream every {1e3 * STEP_S:g} ms, streams "
        f"of {NUM_TOKENS} tokens after a prompt of {len(PROMPT)}. Bare is a process that reads the same link by "
        "grpc.aio, whose steps name no streams, and writes ready-made messages by grpc.aio or uvicorn, with no work of "
        "ours.",
    )
    return Grid(title="What a token costs the gateway", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())
