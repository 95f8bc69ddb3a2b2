"""How long a stream stands still when its decode worker is killed, beside what it takes to compute its KV again.

One prefill worker and two decode workers, nothing pinned, streams on both. Once every stream is well under way, one
decode worker gets SIGKILL; its streams go on elsewhere from prompt and tokens so far. The stall is the longest gap of a
stream that ended after the kill. Then prompts as long as what was lost are prefilled, alone and as many at once. The
worker comes back before the next kill. Neither workers that hang without dying nor prefill workers that die are
measured.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

from moonshard.experiments.bench.serving.streams import ask_grpc, random_prompt
from moonshard.experiments.common.grid import Grid, number, spread
from moonshard.experiments.common.running.deployment import Deployment, deployed
from moonshard.experiments.common.running.measurement import Measurement, Plan, Unit
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import RequestError
from moonshard.serving.config.keys import Config

NUM_DECODE = 2
UNDER_WAY_SHARE = 8  # a stream is under way with this part of its tokens
STALL = "longest gap, streams that lost their worker"
KEPT = "longest gap after a kill, streams that kept theirs"
GONE = "SIGKILL to the end of the process"
ALONE = "prefill of as many tokens, alone"
AT_ONCE = "prefill of as many tokens, as many streams at once, until the last"
LOST_TOKENS = "tokens whose KV was lost, per stream"
LOST_STREAMS = "streams that lost their worker, per kill"
FAILED = "streams that ended with an error, per kill"
UNITS: dict[str, Unit] = {
    **dict.fromkeys((STALL, KEPT, GONE, ALONE, AT_ONCE), "ms"),
    **dict.fromkeys((LOST_TOKENS, LOST_STREAMS, FAILED), "count"),
}
COLUMNS = ("what", "unit", "p50", "p90", "p99", "min to max", "n")


@dataclass(kw_only=True, slots=True)
class WatchedStream:
    """What one client has heard so far."""

    num_prompt: int
    arrivals_ns: list[int] = field(default_factory=list)  # of each token
    under_way: asyncio.Event = field(default_factory=asyncio.Event)
    num_retries: int = 0
    is_failed: bool = False

    def stall_ms(self, killed_ns: int) -> float | None:
        """The longest gap that ended after the kill; None where no token came after it."""
        gaps = [(after - before) / 1e6 for before, after in pairwise(self.arrivals_ns) if after > killed_ns]
        return max(gaps, default=None)

    def num_lost(self, killed_ns: int) -> int:
        """Tokens whose KV lay on its worker when that was killed."""
        return self.num_prompt + sum(arrived_ns <= killed_ns for arrived_ns in self.arrivals_ns)


def measure_failover(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Kills decode workers under load and times the stalls. ServerFailed where a process does not start."""
    roles = {"prefill": replace(config.prefill, replicas=1), "decode": replace(config.decode, replicas=NUM_DECODE)}
    config = replace(config, mode="disaggregated", **roles)
    found: list[Measurement] = []
    with deployed(config, environment) as deployment:
        for index in range(plan.kills):
            victim = f"decode {index % NUM_DECODE}"
            found += asyncio.run(_kill_once(deployment, victim, plan, seed=index))
            deployment.restart(victim)
    return found


async def _kill_once(deployment: Deployment, victim: str, plan: Plan, *, seed: int) -> list[Measurement]:
    random = Random(f"failover {seed}")
    num_prompt = plan.context_tokens[0]
    async with AsyncClient(deployment.server.grpc) as client:
        vocab_size = (await client.model_info()).vocab_size
        await ask_grpc(client, random_prompt(random, vocab_size, num_prompt), 2)
        streams = [WatchedStream(num_prompt=num_prompt) for _ in range(plan.num_streams)]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                prompt = random_prompt(random, vocab_size, num_prompt)
                group.create_task(_listen(client, stream, prompt, plan.killed_tokens))
            for stream in streams:
                await stream.under_way.wait()
            killed_ns = time.perf_counter_ns()
            await asyncio.to_thread(deployment.workers[victim].kill)
            gone_ms = (time.perf_counter_ns() - killed_ns) / 1e6
        lost = [stream for stream in streams if stream.num_retries]
        num_tokens = sum(stream.num_lost(killed_ns) for stream in lost) // max(1, len(lost))
        again = await _prefills(client, random, vocab_size, num_tokens, len(lost)) if lost else []
    return [*of_kill(streams, killed_ns), _measured(GONE, [gone_ms]), *again]


async def _listen(client: AsyncClient, stream: WatchedStream, prompt: list[int], max_tokens: int) -> None:
    try:
        async with client.stream(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as answer:
            async for delta in answer:
                stream.arrivals_ns += [time.perf_counter_ns()] * len(delta.token_ids)
                if len(stream.arrivals_ns) >= max_tokens // UNDER_WAY_SHARE:
                    stream.under_way.set()
        stream.num_retries = answer.summary.timing.num_retries
    except RequestError:
        stream.is_failed = True
        stream.under_way.set()


async def _prefills(
    client: AsyncClient, random: Random, vocab_size: int, num_tokens: int, num_streams: int
) -> list[Measurement]:
    """Times what computing the lost KV again costs: one fresh prompt of that length, then as many as were lost."""
    alone = await ask_grpc(client, random_prompt(random, vocab_size, num_tokens), 1)
    prompts = [random_prompt(random, vocab_size, num_tokens) for _ in range(num_streams)]
    together = await asyncio.gather(*(ask_grpc(client, prompt, 1) for prompt in prompts))
    return [_measured(ALONE, [alone.ttft_ms]), _measured(AT_ONCE, [max(seen.ttft_ms for seen in together)])]


def of_kill(streams: Sequence[WatchedStream], killed_ns: int) -> list[Measurement]:
    """The figures of one kill; `killed_ns` is on the clock of the arrivals."""
    lost = [stream for stream in streams if stream.num_retries]
    kept = [stream for stream in streams if not stream.num_retries and not stream.is_failed]
    samples = {
        STALL: [ms for stream in lost if (ms := stream.stall_ms(killed_ns)) is not None],
        KEPT: [ms for stream in kept if (ms := stream.stall_ms(killed_ns)) is not None],
        LOST_TOKENS: [float(stream.num_lost(killed_ns)) for stream in lost],
        LOST_STREAMS: [float(len(lost))],
        FAILED: [float(sum(stream.is_failed for stream in streams))],
    }
    return [_measured(name, values) for name, values in samples.items() if values]


def _measured(name: str, values: Sequence[float]) -> Measurement:
    return Measurement(level="failover", name=name, unit=UNITS[name], samples=tuple(values))


def failover_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """The stall and, below it, what it is compared with."""
    found = {one.name: one for one in measurements if one.level == "failover"}
    rows = [
        (one.name, one.unit, *(number(one.quantile(q)) for q in (0.5, 0.9, 0.99)), spread(one), str(len(one.samples)))
        for name in UNITS
        if (one := found.get(name)) is not None
    ]
    notes = (
        f"Failover: SIGKILL for one of {NUM_DECODE} decode workers under {plan.num_streams} streams of "
        f"{plan.killed_tokens} tokens, {plan.kills} times; a prefill's figure is its TTFT at the "
        "client. Until the kernel has freed a killed process's memory, nobody sees its links close.",
    )
    return Grid(
        title="Streams whose decode worker is killed", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ()
    )
