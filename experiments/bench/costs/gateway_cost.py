"""What the gateway adds to the time of a token: the same scripted worker, called directly and through a gateway.

Directly means over its Link, as a gateway calls it: one message for all tokens of a step. The bare server is the
control: the public API, a message for each token, and nothing behind it; what it adds is gRPC's and the client's. The
worker makes a step every 50 ms on the clock; streams begin evenly spread over time and each is followed by another, so
that so many are under way. The three take turns.
"""

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import uvloop

from moonshard.experiments.bench.costs.scripted_worker import STEP_S
from moonshard.experiments.bench.serving.streams import Seen, ask_grpc
from moonshard.experiments.common.grid import Grid, number, verdict
from moonshard.experiments.common.running.deployment import Process
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.server import ServerFailed
from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.server.door import open_stream
from moonshard.serving.commands.serve import ChildCommands
from moonshard.serving.config.cluster_key import cluster_key, key_file_of
from moonshard.serving.config.keys import Config
from moonshard.serving.deploy.heap import keep_for_life
from moonshard.serving.gateway.workers.link import METHOD

PROMPT = tuple(range(1, 129))
DIRECT, BARE, THROUGH = WAYS = "direct", "bare gRPC server", "through the gateway"
BARS_MS: Mapping[int, tuple[float, float]] = {1: (5.0, 1.0), 32: (5.0, 1.0), 256: (25.0, 8.0)}  # TTFT and ITL, at p99
COLUMNS = (
    "streams",
    *(f"{what} p99, {way}, ms" for what in ("TTFT", "ITL") for way in WAYS),
    "TTFT added",
    "ITL added",
    "bars",
)

Ask = Callable[[], Awaitable[Seen]]


def measure_gateway(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Times tokens directly, from the bare server and through a gateway. ServerFailed if that does not start."""
    found: list[Measurement] = []
    with scripted_worker(config, environment) as address, gateway_process(config, address, environment) as process:
        gateway = process.said("grpc")
        for _ in range(plan.gateway_rounds):
            for num_streams in BARS_MS:
                for way, seen in uvloop.run(_take_turns(config, address, gateway, num_streams, plan)).items():
                    found += _measurements(num_streams, way, seen)
    return found


@contextmanager
def scripted_worker(config: Config, environment: Mapping[str, str], *, step_s: float = STEP_S) -> Iterator[str]:
    """Starts a worker without a model and yields its address."""
    key_file = str(key_file_of(config, os.environ))
    argv = [sys.executable, "-m", "moonshard.experiments.bench.costs.scripted_worker", key_file, str(step_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None  # it was asked for
        yield f"127.0.0.1:{int(process.stdout.readline())}"
        # leaving closes its input, which is what it ends by


@contextmanager
def gateway_process(config: Config, address: str, environment: Mapping[str, str]) -> Iterator[Process]:
    """Starts a gateway in front of the worker at `address`, and yields it once it is ready."""
    config = replace(config, gateway=replace(config.gateway, port=0, grpc_port=0))
    with TemporaryDirectory() as folder:
        process = Process(name="gateway", log_path=Path(folder) / "gateway.log", environment=environment)
        process.start(ChildCommands(config).gateway([address], None))
        try:
            process.wait_for("moonshard ready")
            yield process
        finally:
            process.stop()


async def _take_turns(
    config: Config, address: str, gateway: str, num_streams: int, plan: Plan
) -> dict[str, list[Seen]]:
    key = cluster_key(config, os.environ).proofs
    async with (
        DirectClient.connected(address, key) as direct,
        AsyncClient(address) as bare,
        AsyncClient(gateway) as client,
    ):
        keep_for_life()  # or this process's own pauses would be counted as the gateway's

        async def through() -> Seen:
            return await ask_grpc(client, PROMPT, plan.gateway_tokens)

        async def without() -> Seen:
            return await ask_grpc(bare, PROMPT, plan.gateway_tokens)

        async def directly() -> Seen:
            return await direct.ask(PROMPT, plan.gateway_tokens)

        return {
            way: await _keep_up(ask, num_streams, plan.gateway_s, plan.gateway_tokens)
            for way, ask in ((DIRECT, directly), (BARE, without), (THROUGH, through))
        }


async def _keep_up(ask: Ask, num_streams: int, duration_s: float, num_tokens: int) -> list[Seen]:
    """Keeps `num_streams` streams going, begun spread over the length of one; the first of each is not counted."""
    end_s = time.perf_counter() + duration_s

    async def one_after_another(index: int) -> list[Seen]:
        await asyncio.sleep(index / num_streams * num_tokens * STEP_S)
        seen = [await ask()]
        while time.perf_counter() < end_s:
            seen.append(await ask())
        return seen[1:] or seen

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_after_another(index)) for index in range(num_streams)]
    return [seen for task in tasks for seen in task.result()]


class DirectClient:
    """Asks a worker over its Link, as a gateway would, and stamps the tokens as they come."""

    def __init__(self, call: grpc.aio.StreamStreamCall):
        self._call = call
        self._writing = asyncio.Lock()  # a call takes one message at a time
        self._arrivals: dict[bytes, list[int]] = {}
        self._ended: dict[bytes, asyncio.Future[None]] = {}

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str, key: bytes) -> AsyncIterator["DirectClient"]:
        async with grpc.aio.insecure_channel(address) as channel:
            port = int(address.rpartition(":")[2])
            call = await open_stream(channel, METHOD, key, port, link_pb2.WorkerMessage.FromString)
            hello = link_pb2.Hello(protocol_version=PROTOCOL_VERSION, gateway_epoch=secrets.token_bytes(16))
            await call.write(link_pb2.GatewayMessage(hello=hello))
            client = cls(call)
            async with asyncio.TaskGroup() as group:  # when the reading fails, nobody waits for what it would bring
                reading = group.create_task(client._read())
                try:
                    yield client
                finally:
                    reading.cancel()
                    call.cancel()

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Seen:
        request_id = secrets.token_bytes(16)
        self._arrivals[request_id] = arrivals_ns = []
        self._ended[request_id] = ended = asyncio.get_running_loop().create_future()
        run = link_pb2.Run(request_id=request_id, prompt_tokens=prompt, max_tokens=max_tokens, n=1)
        sent_ns = time.perf_counter_ns()
        async with self._writing:
            await self._call.write(link_pb2.GatewayMessage(run=run))
        await ended
        return Seen(sent_ns=sent_ns, arrivals_ns=tuple(arrivals_ns), ended_ns=time.perf_counter_ns(), timing=None)

    async def _read(self) -> None:
        async for message in self._call:
            now_ns = time.perf_counter_ns()
            for output in message.step.outputs:
                self._arrivals[output.request_id] += [now_ns] * len(output.token_ids)
                if output.finish_reason:
                    del self._arrivals[output.request_id]
                    self._ended.pop(output.request_id).set_result(None)
        raise ServerFailed("the scripted worker ended its link")


def _measurements(num_streams: int, way: str, seen: Sequence[Seen]) -> list[Measurement]:
    samples = {"TTFT": [one.ttft_ms for one in seen], "ITL": [gap_ms for one in seen for gap_ms in one.gaps_ms]}
    return [
        Measurement(level="gateway", name=_name(what, num_streams, way), unit="ms", samples=tuple(values))
        for what, values in samples.items()
    ]


def _name(what: str, num_streams: int, way: str) -> str:
    return f"{what}, {num_streams} streams, {way}"


def gateway_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """A row for each number of streams. What the gateway adds is a difference of p99s."""
    p99 = {one.name: one.quantile(0.99) for one in measurements if one.level == "gateway"}
    rows = []
    for num_streams, bars in BARS_MS.items():
        cells = [p99.get(_name(what, num_streams, way)) for what in ("TTFT", "ITL") for way in WAYS]
        found = [cell for cell in cells if cell is not None]
        if len(found) < len(cells):
            continue
        added = (found[2] - found[0], found[5] - found[3])
        held = verdict(all(one <= bar for one, bar in zip(added, bars, strict=True)))
        told = f"{bars[0]:g} and {bars[1]:g} ms: {held}"
        rows.append((str(num_streams), *map(number, found), *(f"{one:+.1f}" for one in added), told))
    notes = (
        f"Gateway: a worker without a model makes a step every {1e3 * STEP_S:g} ms; streams of {plan.gateway_tokens} "
        "tokens over gRPC, begun evenly spread. Worker, gateway and clients share the cores. The bare gRPC server has "
        "nothing behind it: what it takes longer than direct is gRPC's and the client's own.",
    )
    return Grid(title="What the gateway adds", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())
