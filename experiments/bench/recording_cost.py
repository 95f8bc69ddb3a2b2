"""What a server loses where it records (`trace.path`), or sends spans (`telemetry.endpoint`), against a plain one.

One deployment of each kind is up all the time, and they get the same closed loop of requests in turn, round by round;
whoever begins changes with the round. A ratio is of one round's two turns, so that what a machine does for minutes hits
both. Processor time per token is told beside the throughput: it varies less, and has what is done between turns. Left
out: a row for each token (`trace.tokens`), and what a collector costs on a machine of its own; here one that
reads and forgets.
"""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from moonshard.experiments.bench.deployment import deployed
from moonshard.experiments.bench.grid import Grid, number
from moonshard.experiments.bench.measurement import Measurement, Plan
from moonshard.experiments.bench.server import RunningServer
from moonshard.experiments.bench.streams import closed_loop
from moonshard.rpc.client import AsyncClient
from moonshard.serving.config import Config, TelemetryConfig, TraceConfig

OFF, RECORDING, SPANS = "off", "recording", "spans"
TOKENS, PROCESSOR = "output tokens", "processor time per token"
BAR = 0.99  # of the throughput without
NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
SINK = (sys.executable, "-m", "moonshard.experiments.bench.span_sink")
COLUMNS = ("what", "unit", "off, p50", "on, p50", "on / off, p50", "95% interval", "rounds", f"bar: {BAR:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One deployment's part of a round."""

    num_tokens: int
    elapsed_s: float
    cpu_s: float  # of all its processes, in the whole round


def measure_recording(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """ServerFailed if one of the deployments does not start."""
    found: list[Measurement] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        arranged = {
            OFF: replace(config, trace=TraceConfig(), telemetry=TelemetryConfig()),
            RECORDING: replace(config, trace=TraceConfig(path=folder), telemetry=TelemetryConfig()),
            SPANS: replace(
                config,
                trace=TraceConfig(),
                telemetry=TelemetryConfig(endpoint=stack.enter_context(_sink(environment)), protocol="http"),
            ),
        }
        servers = {way: stack.enter_context(deployed(each, environment)).server for way, each in arranged.items()}
        for server in servers.values():
            asyncio.run(_play(server, plan, "warm"))
        for index in range(plan.recording_rounds):
            for way, turn in _round(servers, order_of(list(servers), index), plan, str(index)).items():
                found += of_turn(way, turn)
    return found


def order_of(ways: Sequence[str], index: int) -> list[str]:
    """Of a round: each way begins as often as any other, and every other time those behind it have changed places."""
    cycle, first = divmod(index, len(ways))
    rotated = [*ways[first:], *ways[:first]]
    return rotated if cycle % 2 == 0 else [rotated[0], *reversed(rotated[1:])]


@contextmanager
def _sink(environment: Mapping[str, str]) -> Iterator[str]:
    """A collector's URL."""
    pipe = subprocess.PIPE
    with subprocess.Popen(SINK, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None  # it was asked for
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        # leaving closes its input, which is what it ends by


def _round(servers: Mapping[str, RunningServer], order: Sequence[str], plan: Plan, seed: str) -> dict[str, Turn]:
    """Processor time is that of the whole round: what is left over from a turn is written and sent in another's."""
    before_s = {way: _cpu_s(servers[way]) for way in order}
    played = {way: asyncio.run(_play(servers[way], plan, seed)) for way in order}
    return {
        way: Turn(num_tokens=num_tokens, elapsed_s=elapsed_s, cpu_s=_cpu_s(servers[way]) - before_s[way])
        for way, (num_tokens, elapsed_s) in played.items()
    }


async def _play(server: RunningServer, plan: Plan, seed: str) -> tuple[int, float]:
    """The tokens that came, and the seconds that they took."""
    async with AsyncClient(server.grpc) as client:
        vocab_size = (await client.model_info()).vocab_size
        begun_s = time.perf_counter()
        seen = await closed_loop(
            client,
            num_clients=plan.num_streams,
            requests_per_client=plan.recording_requests,
            prompt_tokens=plan.context_tokens[0],
            max_tokens=plan.completion_tokens,
            vocab_size=vocab_size,
            seed=seed,
        )
        elapsed_s = time.perf_counter() - begun_s
    return sum(len(one.arrivals_ns) for one in seen), elapsed_s


def _cpu_s(server: RunningServer) -> float:
    return sum(server.cpu_s(name) for name in server.pids)


def of_turn(way: str, turn: Turn) -> list[Measurement]:
    tokens, processor = turn.num_tokens / turn.elapsed_s, turn.cpu_s / turn.num_tokens * 1e6
    return [
        Measurement(level="recording", name=_name(TOKENS, way), unit="tokens/s", samples=(tokens,)),
        Measurement(level="recording", name=_name(PROCESSOR, way), unit="us", samples=(processor,)),
    ]


def recording_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """Each of the two against neither. Processor time has no bar: it is told for what throughput is too coarse for."""
    found = {one.name: one for one in measurements if one.level == "recording"}
    rows = []
    for way in (RECORDING, SPANS):
        for what in (TOKENS, PROCESSOR):
            off, on = found.get(_name(what, OFF)), found.get(_name(what, way))
            if off is None or on is None:
                continue
            ratios = [b / a for a, b in zip(off.samples, on.samples, strict=True)]
            low, high = median_interval(ratios)
            said = _verdict(low, high) if what == TOKENS else ""
            cells = (number(off.median), number(on.median), f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}")
            rows.append((_name(what, way), off.unit, *cells, str(len(ratios)), said))
    notes = (
        f"Recording: {plan.num_streams} clients, each with {plan.recording_requests} requests a round of "
        f"{plan.context_tokens[0]} prompt tokens and {plan.completion_tokens} generated. Three deployments, one of "
        "them plain, take turns with the same requests; a ratio is of one round, and its interval is the median's, by "
        "resampling rounds. Processor time is that of a deployment's processes in the whole round: files are written "
        "some seconds later, in whosever turn that is.",
    )
    return Grid(title="What recording costs", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, by resampling; the same for the same values."""
    drawing = random.Random(0)
    medians = sorted(median(drawing.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    rest = (1 - CONFIDENCE) / 2
    return medians[round(rest * (NUM_RESAMPLES - 1))], medians[round((1 - rest) * (NUM_RESAMPLES - 1))]


def _verdict(low: float, high: float) -> str:
    """Neither where the interval has the bar in it: then it takes more rounds to tell."""
    if low >= BAR:
        return "held"
    return "missed" if high < BAR else "open"


def _name(what: str, way: str) -> str:
    return f"{what}, {way}"
