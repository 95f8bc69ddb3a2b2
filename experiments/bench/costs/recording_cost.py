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
    """ServerFailed if one of the deployments does not start."""
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
    """The turns from one start of all to the next, and the tokens that the recording one gave before them.

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


def _round(
    servers: Mapping[str, RunningServer], order: Sequence[str], plan: Plan, seed: str
) -> dict[str, RecordedTurn]:
    """Processor time is that of the whole round: what is left over from a turn is written and sent in another's."""
    before_s = {way: _cpu_s(servers[way]) for way in order}
    played = {way: asyncio.run(_play(servers[way], plan, seed)) for way in order}
    return {
        way: RecordedTurn(num_tokens=num_tokens, elapsed_s=elapsed_s, cpu_s=_cpu_s(servers[way]) - before_s[way])
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


def of_turn(way: str, turn: RecordedTurn) -> list[Measurement]:
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
    """What of it can be told without a second deployment."""
    del plan
    return row_grid(measurements, _name(PROCESSOR, OFF))


def by_start(off: Sequence[float], on: Sequence[float], num_rounds: int) -> list[float]:
    """on / off: the geometric mean of each start's rounds, of which there are so many."""
    logs = [log(b / a) for a, b in zip(off, on, strict=True)]
    return [exp(fmean(one)) for one in batched(logs, num_rounds)]


def _bounds(interval: Interval) -> str:
    return "" if interval.low is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _verdict(interval: Interval) -> str:
    """Neither where the interval has the bar in it, or there is none: then it takes more starts to tell."""
    if interval.low is None or interval.high is None:
        return "open"
    if interval.low >= BAR:
        return "held"
    return "missed" if interval.high < BAR else "open"


def _name(what: str, way: str) -> str:
    return f"{what}, {way}"
