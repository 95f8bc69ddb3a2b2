"""The whole stack under load, as its clients see it: TTFT, ITL, throughput, and what the gateway adds to the workers.

The level says how it is arranged: "served" is one aggregated worker, "disaggregated" a prefill and a decode worker.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import httpx

from moonshard.experiments.bench.serving.streams import Seen, ask_grpc, ask_http, closed_loop, random_prompt
from moonshard.experiments.common.running.measurement import Level, Measurement, Plan, Unit
from moonshard.experiments.common.running.server import RunningServer
from moonshard.rpc.client import AsyncClient

TTFT_MAX_TOKENS = 2
TOLD_TOGETHER = "tokens told with the one before"  # of each request; ITL has no gap for them


async def measure_served(server: RunningServer, plan: Plan, seed: int, level: Level = "served") -> list[Measurement]:
    """One round of the whole stack. The first request of each kind warms up and is not counted."""
    limits = httpx.Timeout(60.0)
    async with (
        AsyncClient(server.grpc) as client,
        httpx.AsyncClient(base_url=server.http, timeout=limits, trust_env=False) as http,
    ):
        vocab_size = (await client.model_info()).vocab_size
        found = await _ttft(server, client, http, vocab_size, plan, seed)
        for batch in plan.batches:
            found += await _load(server, client, batch, vocab_size, plan, seed)
        return _at(level, found)


async def _ttft(
    server: RunningServer, client: AsyncClient, http: httpx.AsyncClient, vocab_size: int, plan: Plan, seed: int
) -> list[Measurement]:
    """TTFT over gRPC and HTTP in turn, one request at a time."""
    found, random = [], Random(f"{seed} ttft")
    for num_tokens in plan.prompt_tokens:
        over_grpc, over_http = [], []
        for _ in range(plan.repeats + 1):
            first, second = (random_prompt(random, vocab_size, num_tokens) for _ in range(2))
            over_grpc.append(await ask_grpc(client, first, TTFT_MAX_TOKENS))
            over_http.append(await ask_http(http, server.model, second, TTFT_MAX_TOKENS))
        for name, seen in (("gRPC", over_grpc[1:]), ("HTTP", over_http[1:])):
            found.append(_served(f"TTFT, {num_tokens} prompt tokens, {name}", "ms", [one.ttft_ms for one in seen]))
    return found


async def _load(
    server: RunningServer, client: AsyncClient, batch: int, vocab_size: int, plan: Plan, seed: int
) -> list[Measurement]:
    """A closed loop of `batch` streams, and the processor time of each process."""

    async def run(requests_per_client: int, name: str) -> list[Seen]:
        return await closed_loop(
            client,
            num_clients=batch,
            requests_per_client=requests_per_client,
            prompt_tokens=plan.context_tokens[0],
            max_tokens=plan.completion_tokens,
            vocab_size=vocab_size,
            seed=f"{seed} {name} {batch}",
        )

    await run(1, "warm")
    counted, spent = server.counters(), _cpu_s(server)
    begun_s = time.perf_counter()
    seen = await run(plan.repeats, "load")
    elapsed_s = time.perf_counter() - begun_s
    spent = {role: after - spent[role] for role, after in _cpu_s(server).items()}
    counted = {name: value - counted.get(name, 0.0) for name, value in server.counters().items()}
    return [
        *_latencies(batch, seen, elapsed_s),
        *_overheads(batch, seen),
        *_costs(batch, seen, spent, elapsed_s),
        *_steps(batch, counted),
    ]


def _latencies(batch: int, seen: Sequence[Seen], elapsed_s: float) -> list[Measurement]:
    num_tokens = sum(len(one.arrivals_ns) for one in seen)
    return [
        _served(f"ITL, batch {batch}", "ms", [gap for one in seen for gap in one.gaps_ms]),
        _served(
            f"{TOLD_TOGETHER}, batch {batch}",
            "count",
            [float(len(one.arrivals_ns) - 1 - len(one.gaps_ms)) for one in seen],
        ),
        _served(f"TPOT, batch {batch}", "ms", [one.decode_ms / (len(one.arrivals_ns) - 1) for one in seen]),
        _served(f"output tokens, batch {batch}", "tokens/s", [num_tokens / elapsed_s]),
        _served(f"TTFT under load, batch {batch}", "ms", [one.ttft_ms for one in seen]),
    ]


def _overheads(batch: int, seen: Sequence[Seen]) -> list[Measurement]:
    """What the client waited for beyond the phases that the worker reported, once per request and once per token."""
    timed = [(one, one.timing) for one in seen if one.timing is not None]
    first = [
        one.ttft_ms - timing.decode_queue_ms - timing.worker_queue_ms - timing.worker_prefill_ms
        for one, timing in timed
    ]
    token = [(one.decode_ms - timing.worker_decode_ms) / (len(one.arrivals_ns) - 1) * 1e3 for one, timing in timed]
    finish = [one.e2e_ms - one.ttft_ms - one.decode_ms for one, _ in timed]
    return [
        _served(f"overhead before the first token, batch {batch}", "ms", first),
        _served(f"overhead per later token, batch {batch}", "us", token),
        _served(f"overhead after the last token, batch {batch}", "ms", finish),
    ]


def _costs(batch: int, seen: Sequence[Seen], spent_s: dict[str, float], elapsed_s: float) -> list[Measurement]:
    num_tokens = sum(len(one.arrivals_ns) for one in seen)
    per_token = [
        _served(f"processor time per token, {role}, batch {batch}", "us", [cpu_s / num_tokens * 1e6])
        for role, cpu_s in spent_s.items()
    ]
    client = _served(f"load generator's share of a core, batch {batch}", "share", [spent_s["client"] / elapsed_s])
    return [*per_token, client]


def _cpu_s(server: RunningServer) -> dict[str, float]:
    return {role: server.cpu_s(role) for role in server.pids} | {"client": time.process_time()}


def _steps(batch: int, counted: dict[str, float]) -> list[Measurement]:
    """Times of steps as the workers count them."""
    num_steps = max(1.0, counted["moonshard_decode_steps_total"])
    overlapped = counted["moonshard_overlapped_steps_total"] / num_steps
    occupancy = counted["moonshard_decode_tokens_total"] / num_steps
    return [
        _served(f"overlapped decode steps, batch {batch}", "share", [overlapped]),
        _served(f"sequences in a decode step, batch {batch}", "count", [occupancy]),
    ]


def _served(name: str, unit: Unit, samples: Sequence[float]) -> Measurement:
    return Measurement(level="served", name=name, unit=unit, samples=tuple(samples))


def measure_after(server: RunningServer, level: Level = "served") -> list[Measurement]:
    """What is known after a run: memory, and that nothing was compiled meanwhile."""
    compiled = server.counters()["moonshard_compilations_while_serving_total"]
    found = [
        _served("compilations while serving", "count", [compiled]),
        *(_served(f"peak memory, {role}", "MiB", [server.peak_memory_mib(role)]) for role in server.pids),
    ]
    return _at(level, found)


def _at(level: Level, found: Sequence[Measurement]) -> list[Measurement]:
    return [replace(one, level=level) for one in found]
