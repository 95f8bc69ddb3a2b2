"""What a server loses where it records (`trace.path`), or sends spans (`telemetry.endpoint`), against a plain one.

A deployment of each kind is up at the same time, and they get the same closed loop of requests in turn, round by round;
whoever begins changes with the round. A ratio is of one round's two turns, so that what a machine does for minutes hits
both. Two deployments of the same settings differ by some percent as long as they live: all are started again several
times, in another order, and an interval is over the starts. Costs too small for such a comparison are measured in
`row_cost`. A row for each token (`trace.tokens`) is not recorded here, and the collector runs on the same machine: one
that reads and forgets.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import batched
from math import exp, log
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from moonshard.experiments.bench.costs.row_cost import measure_rows, row_grid, rows_a_token
from moonshard.experiments.bench.serving.streams import closed_loop
from moonshard.experiments.common.grid import Grid, number
from moonshard.experiments.common.intervals import Interval, ratio_interval
from moonshard.experiments.common.running.deployment import deployed
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.server import RunningServer
from moonshard.rpc.client import AsyncClient
from moonshard.serving.config.keys import Config, TelemetryConfig, TraceConfig

OFF, RECORDING, SPANS = "off", "recording", "spans"
TOKENS, PROCESSOR = "output tokens", "processor time per token"
BAR = 0.99  # of the throughput without
SINK = (sys.executable, "-m", "moonshard.experiments.bench.costs.span_sink")
COLUMNS = ("what", "unit", "off, p50", "on, p50", "on / off", "95% interval", "starts", f"bar: {BAR:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTurn:
    """One deployment's part of a round."""

    num_tokens: int
    elapsed_s: float
    cpu_s: float  # of all its processes, in the whole round


def measure_recording(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Compares deployments that record, send spans, or do neither. ServerFailed if one of them does not start."""
    found = measure_rows(plan)
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
        num_recorded = 0
        for start in range(plan.recording_starts):
            ordered = {way: arranged[way] for way in order_of(list(arranged), start)}
            warm_tokens, turns = _started(ordered, plan, environment, start)
            num_recorded += warm_tokens + sum(turn.num_tokens for way, turn in turns if way == RECORDING)
            found += [one for way, turn in turns for one in of_turn(way, turn)]
        found += rows_a_token(folder, num_recorded)
    return found


def _started(
    arranged: Mapping[str, Config], plan: Plan, environment: Mapping[str, str], start: int
) -> tuple[int, list[tuple[str, RecordedTurn]]]:
    """Starts all deployments once: the tokens that the recording one gave while warming up, and the turns.

    They are stopped in the end, and have written what they recorded.
    """
    turns: list[tuple[str, RecordedTurn]] = []
    with ExitStack() as stack:
        servers = {way: stack.enter_context(deployed(each, environment)).server for way, each in arranged.items()}
        warm = {way: asyncio.run(_play(server, plan, f"warm {start}")) for way, server in servers.items()}
        for index in range(plan.recording_rounds):
            order = order_of(list(servers), index)
            turns += _round(servers, order, plan, f"{start} {index}").items()
    return warm[RECORDING][0], turns


def order_of(ways: Sequence[str], index: int) -> list[str]:
    """The order of round `index`: each way begins equally often; every other cycle reverses those behind it."""
    cycle, first = divmod(index, len(ways))
    rotated = [*ways[first:], *ways[:first]]
    return rotated if cycle % 2 == 0 else [rotated[0], *reversed(rotated[1:])]


@contextmanager
def _sink(environment: Mapping[str, str]) -> Iterator[str]:
    """Starts a collector of spans and yields its URL."""
    pipe = subprocess.PIPE
    with subprocess.Popen(SINK, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None  # it was asked for
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        # leaving closes its input, which is what it ends by


def _round(
    servers: Mapping[str, RunningServer], order: Sequence[str], plan: Plan, seed: str
) -> dict[str, RecordedTurn]:
    """One round. Processor time is counted over all of it: what a turn leaves over is written in another's turn."""
    before_s = {way: _cpu_s(servers[way]) for way in order}
    played = {way: asyncio.run(_play(servers[way], plan, seed)) for way in order}
    return {
        way: RecordedTurn(num_tokens=num_tokens, elapsed_s=elapsed_s, cpu_s=_cpu_s(servers[way]) - before_s[way])
        for way, (num_tokens, elapsed_s) in played.items()
    }


async def _play(server: RunningServer, plan: Plan, seed: str) -> tuple[int, float]:
    """Plays the load against one server: the tokens that came, and the seconds that they took."""
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


def of_turn(way: str, turn: RecordedTurn) -> list[Measurement]:
    tokens, processor = turn.num_tokens / turn.elapsed_s, turn.cpu_s / turn.num_tokens * 1e6
    return [
        Measurement(level="recording", name=_name(TOKENS, way), unit="tokens/s", samples=(tokens,)),
        Measurement(level="recording", name=_name(PROCESSOR, way), unit="us", samples=(processor,)),
    ]


def recording_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """Each of the two against neither. Processor time has no bar; it shows costs too small for throughput to show."""
    found = {one.name: one for one in measurements if one.level == "recording"}
    rows = []
    for way in (RECORDING, SPANS):
        for what in (TOKENS, PROCESSOR):
            off, on = found.get(_name(what, OFF)), found.get(_name(what, way))
            if off is None or on is None:
                continue
            interval = ratio_interval(by_start(off.samples, on.samples, plan.recording_rounds))
            said = _verdict(interval) if what == TOKENS else ""
            cells = (number(off.median), number(on.median), f"{interval.value:.3f}", _bounds(interval))
            rows.append((_name(what, way), off.unit, *cells, str(interval.num_repeats), said))
    notes = (
        f"Recording: {plan.num_streams} clients, each with {plan.recording_requests} requests a round of "
        f"{plan.context_tokens[0]} prompt tokens and {plan.completion_tokens} generated. Three deployments, one of "
        f"them plain, take turns with the same requests, {plan.recording_rounds} rounds a start. A ratio is the "
        "geometric mean of a start's rounds, and the interval Student's over the starts, on logarithms. Processor time "
        "is that of a deployment's processes in the whole round: files are written some seconds later, in whosever "
        "turn that is.",
    )
    return Grid(title="What recording costs", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())


def recorded_row_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """The part of the cost that can be measured without a second deployment."""
    del plan
    return row_grid(measurements, _name(PROCESSOR, OFF))


def by_start(off: Sequence[float], on: Sequence[float], num_rounds: int) -> list[float]:
    """on / off, by start: the geometric mean of its `num_rounds` rounds."""
    logs = [log(b / a) for a, b in zip(off, on, strict=True)]
    return [exp(fmean(one)) for one in batched(logs, num_rounds)]


def _bounds(interval: Interval) -> str:
    return "" if interval.low is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _verdict(interval: Interval) -> str:
    """Open where the interval has the bar in it, or there is no interval: then more starts are needed."""
    if interval.low is None or interval.high is None:
        return "open"
    if interval.low >= BAR:
        return "held"
    return "missed" if interval.high < BAR else "open"


def _name(what: str, way: str) -> str:
    return f"{what}, {way}"
