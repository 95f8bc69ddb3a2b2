"""Prefill and decode apart, against the same two devices each doing both: steady streams, and long prompts among them.

A device is one core with one XLA thread. Disaggregated, the first has a prefill worker and the second a decode worker;
aggregated, each has a worker that does both. The gateways and the load generator are not pinned and share those cores
where there are no others, so what they took of a core is reported. Both arrangements are up all the time and get the
same load in turn, round by round. Long prompts take at most half of one device's time: where prefill is the bottleneck
the arrangement with fewer devices for it must lose. More devices, and other ratios of prefill to decode workers than 1,
are not measured here (see `studies.ratio`).
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random

from moonshard.experiments.bench.serving.streams import Seen, ask_grpc, random_prompt
from moonshard.experiments.common.grid import Grid, number
from moonshard.experiments.common.intervals import PERCENTILES
from moonshard.experiments.common.running.deployment import deployed
from moonshard.experiments.common.running.measurement import Measurement, Plan, Unit
from moonshard.experiments.common.running.server import RunningServer, ServerFailed
from moonshard.rpc.client import AsyncClient
from moonshard.serving.config.keys import Config

APART, TOGETHER = "disaggregated", "aggregated"
LONG_MAX_TOKENS = 16
WARM_S = 2.0  # of the same load, before what counts
LONG_SHARE = 0.5  # of a device's time, that long prompts may take
LONG_ALONE = 3  # prompts, before all rounds, that tell how long one takes
MIN_LONG = 6  # prompts in a round, however long one takes
EVERY = "a long prompt every"
QUANTITIES: dict[str, Unit] = {
    "TTFT, long prompts": "ms",
    "TTFT, streams": "ms",
    "ITL, streams": "ms",
    "ITL from the second token on, streams": "ms",
    "handoff gap, streams": "ms",
    "output tokens, streams": "tokens/s",
    "prompt and output tokens, all requests": "tokens/s",
    "a core's share, gateway": "share",
    "a core's share, load generator": "share",
    "a core's share, workers": "share",
}
COLUMNS = (
    *("what", "unit"),
    *(f"{short} {q}" for short in ("PD", "agg.") for q in PERCENTILES),
    *(f"ratio {q}" for q in PERCENTILES),
    "n",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedLoad:
    """What the clients of one arrangement saw in one round, and what its processes spent."""

    streams: Sequence[Seen]
    long: Sequence[Seen]
    prompt_tokens: int  # of all of them
    elapsed_s: float
    cpu_s: Mapping[str, float]  # by process; `client` is the load generator


def measure_arrangements(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Measures both arrangements. ServerFailed on a machine with one core, or where a process does not start."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ServerFailed("comparing the arrangements needs two cores")
    found: list[Measurement] = []
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(deployed(arranged, environment, cores=cores)).server
            for name, arranged in ((APART, apart(config)), (TOGETHER, together(config)))
        }
        plan = paced(plan, asyncio.run(_long_alone_s(servers[TOGETHER], plan)))
        found.append(
            Measurement(level="arrangements", name=EVERY, unit="s", samples=(plan.long_prompt_every_s,)),
        )
        for index in range(plan.arrangement_rounds):
            for name, server in servers.items():
                found += of_load(name, asyncio.run(_load(server, plan, index)))
    return found


def paced(plan: Plan, alone_s: float) -> Plan:
    """The plan with long prompts at a rate that half of one device can prefill, where one alone takes `alone_s`."""
    every_s = max(plan.long_prompt_every_s, alone_s / LONG_SHARE)
    return replace(plan, long_prompt_every_s=every_s, arrangement_s=max(plan.arrangement_s, MIN_LONG * every_s))


async def _long_alone_s(server: RunningServer, plan: Plan) -> float:
    async with AsyncClient(server.grpc) as client:
        generator = _Generator(client, plan, (await client.model_info()).vocab_size, "alone")
        return min([await generator.ask_long_alone(index) for index in range(LONG_ALONE)])


def apart(config: Config) -> Config:
    """The configuration with one prefill and one decode worker."""
    roles = {"prefill": replace(config.prefill, replicas=1), "decode": replace(config.decode, replicas=1)}
    return replace(config, mode="disaggregated", **roles)


def together(config: Config) -> Config:
    """The configuration with two workers that do both."""
    return replace(config, mode="aggregated", decode=replace(config.decode, replicas=2))


async def _load(server: RunningServer, plan: Plan, seed: int) -> OfferedLoad:
    async with AsyncClient(server.grpc) as client:
        vocab_size = (await client.model_info()).vocab_size
        await _Generator(client, plan, vocab_size, f"{seed} warm").run(min(WARM_S, plan.arrangement_s))
        generator = _Generator(client, plan, vocab_size, f"{seed}")
        before, begun_s = _cpu_s(server), time.perf_counter()
        await generator.run(plan.arrangement_s)
        elapsed_s = time.perf_counter() - begun_s
        spent = {name: after - before[name] for name, after in _cpu_s(server).items()}
    return OfferedLoad(
        streams=generator.streams,
        long=generator.long,
        prompt_tokens=generator.num_prompt_tokens,
        elapsed_s=elapsed_s,
        cpu_s=spent,
    )


class _Generator:
    """Streams that follow one another without a pause, and at every tick a long prompt, whatever is still running."""

    def __init__(self, client: AsyncClient, plan: Plan, vocab_size: int, seed: str):
        self.streams: list[Seen] = []
        self.long: list[Seen] = []
        self.num_prompt_tokens = 0
        self._client = client
        self._plan = plan
        self._vocab_size = vocab_size
        self._seed = seed

    async def run(self, duration_s: float) -> None:
        """Starts nothing more after `duration_s`, and returns when all requests have ended."""
        end_s = time.perf_counter() + duration_s
        async with asyncio.TaskGroup() as group:
            for index in range(self._plan.num_streams):
                group.create_task(self._stream(index, end_s))
            random = Random(f"{self._seed} long")
            while time.perf_counter() < end_s:
                group.create_task(self._ask_long(self._prompt(random, self._plan.long_prompt_tokens)))
                await asyncio.sleep(self._plan.long_prompt_every_s)

    async def ask_long_alone(self, index: int) -> float:
        """Asks for a long prompt and nothing else, and returns the seconds until its first token."""
        await self._ask_long(self._prompt(Random(f"{self._seed} {index}"), self._plan.long_prompt_tokens))
        return self.long[-1].ttft_ms / 1e3

    async def _stream(self, index: int, end_s: float) -> None:
        random = Random(f"{self._seed} {index}")
        while time.perf_counter() < end_s:
            prompt = self._prompt(random, self._plan.context_tokens[0])
            self.streams.append(await ask_grpc(self._client, prompt, self._plan.completion_tokens))

    async def _ask_long(self, prompt: list[int]) -> None:
        self.long.append(await ask_grpc(self._client, prompt, LONG_MAX_TOKENS))

    def _prompt(self, random: Random, num_tokens: int) -> list[int]:
        self.num_prompt_tokens += num_tokens
        return random_prompt(random, self._vocab_size, num_tokens)


def _cpu_s(server: RunningServer) -> dict[str, float]:
    return {name: server.cpu_s(name) for name in server.pids} | {"client": time.process_time()}


def of_load(arrangement: str, load: OfferedLoad) -> list[Measurement]:
    timings = [seen.timing for seen in load.streams if seen.timing is not None]
    of_streams, of_long = (sum(len(seen.arrivals_ns) for seen in each) for each in (load.streams, load.long))
    of_all = load.prompt_tokens + of_streams + of_long
    workers_s = sum(cpu_s for name, cpu_s in load.cpu_s.items() if name not in ("gateway", "client"))
    samples: dict[str, list[float]] = {
        "TTFT, long prompts": [seen.ttft_ms for seen in load.long],
        "TTFT, streams": [seen.ttft_ms for seen in load.streams],
        "ITL, streams": [gap_ms for seen in load.streams for gap_ms in seen.gaps_ms],
        "ITL from the second token on, streams": [gap_ms for seen in load.streams for gap_ms in seen.gaps_ms[1:]],
        "handoff gap, streams": [timing.handoff_gap_ms for timing in timings if timing.handoff_gap_ms],
        "output tokens, streams": [of_streams / load.elapsed_s],
        "prompt and output tokens, all requests": [of_all / load.elapsed_s],
        "a core's share, gateway": [load.cpu_s["gateway"] / load.elapsed_s],
        "a core's share, load generator": [load.cpu_s["client"] / load.elapsed_s],
        "a core's share, workers": [workers_s / load.elapsed_s],
    }
    return [
        Measurement(
            level="arrangements", name=_name(quantity, arrangement), unit=QUANTITIES[quantity], samples=tuple(values)
        )
        for quantity, values in samples.items()
        if values
    ]


def arrangement_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """Both arrangements side by side. A ratio is disaggregated / aggregated."""
    found = {one.name: one for one in measurements if one.level == "arrangements"}
    rows = []
    for quantity, unit in QUANTITIES.items():
        ours, theirs = found.get(_name(quantity, APART)), found.get(_name(quantity, TOGETHER))
        if ours is None:
            continue
        counts = " / ".join(str(len(one.samples)) for one in (ours, theirs) if one)
        rows.append((quantity, unit, *_quantiles(ours), *_quantiles(theirs), *_ratios(ours, theirs), counts))
    every_s = found[EVERY].median if EVERY in found else plan.long_prompt_every_s
    notes = (
        f"Arrangements: two devices, each one core with one XLA thread; {plan.num_streams} streams without a pause "
        f"({plan.context_tokens[0]} prompt tokens, {plan.completion_tokens} generated) and a prompt of "
        f"{plan.long_prompt_tokens:,} tokens every {every_s:.2g} s. Gateway and load generator are not "
        "pinned. PD is one prefill and one decode worker, agg. two workers that do both; a ratio is PD / agg.: for "
        "milliseconds, PD is better below 1. The first gap of a stream is its handoff.",
    )
    title = "Prefill and decode apart, and the same devices each doing both"
    return Grid(title=title, columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())


def _quantiles(one: Measurement | None) -> list[str]:
    """The cells of a figure. A rate has one sample per round, so only their median is shown."""
    if one is None:
        return [""] * len(PERCENTILES)
    return [number(one.quantile(q)) if q == 0.5 or one.unit == "ms" else "" for q in PERCENTILES.values()]


def _ratios(ours: Measurement, theirs: Measurement | None) -> list[str]:
    if theirs is None:
        return [""] * len(PERCENTILES)
    return [
        f"{ours.quantile(q) / theirs.quantile(q):.2f}" if (q == 0.5 or ours.unit == "ms") and theirs.quantile(q) else ""
        for q in PERCENTILES.values()
    ]


def _name(quantity: str, arrangement: str) -> str:
    return f"{quantity}, {arrangement}"
