"""Agents' sessions on real processes: three prefill workers, and who of them gets which turn.

Each arm is a deployment of its own, started with empty caches; arms take turns, round by round, over the same sessions.
Clients send a session's turns one after another over gRPC, as token prompts, with a pause between them. Left out: what
the answers say.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from moonshard.experiments.affinity.workload import Session, oracle_cached_tokens
from moonshard.experiments.bench.deployment import deployed
from moonshard.experiments.bench.server import RunningServer
from moonshard.rpc.client import AsyncClient
from moonshard.serving.config import Config
from moonshard.serving.policy_names import PolicyName

ArmName = Literal["random", "header", "cost"]
SESSION_HEADER = "x-session-affinity"
PREFILL_TOKENS = "moonshard_prefill_tokens_total"
REPORTED_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy, and whether clients name their sessions."""

    policy: PolicyName
    names_sessions: bool


ARMS: Mapping[ArmName, Arm] = {
    "random": Arm("random", names_sessions=False),
    "header": Arm("affinity", names_sessions=True),
    "cost": Arm("cost", names_sessions=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    num_prefill: int = 3
    num_blocks: int = 200  # of each worker's cache: a third of the sessions fit in, all of them do not
    num_clients: int = 12
    num_sessions: int = 24
    session_tokens: int = 3000
    max_tokens: int = 8
    mean_think_s: float = 0.75
    rounds: int = 2
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request as its client saw it."""

    session: int
    index: int
    sent_s: float
    prompt_tokens: int
    cached_tokens: int
    oracle_tokens: int = 0
    ttft_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One arm, once: its turns in the order in which they were sent, and what each prefill worker computed."""

    arm: ArmName
    number: int
    turns: Sequence[Turn]
    computed_tokens: Mapping[str, float]


def run_round(
    config: Config, plan: Plan, arm: ArmName, number: int, sessions: Sequence[Session], environment: Mapping[str, str]
) -> Round:
    """Raises ServerFailed if the processes do not start, RequestError if a request fails."""
    with deployed(arranged(config, plan, ARMS[arm]), environment) as deployment:
        server = deployment.server
        before = computed_by_worker(server)
        turns = asyncio.run(_load(server, plan, ARMS[arm], number, sessions))
        due = sum(turn.prompt_tokens - turn.cached_tokens for turn in turns)
        computed = _computed_since(server, before, due)
    ordered = sorted(turns, key=lambda turn: turn.sent_s)
    prompts = [sessions[turn.session][turn.index] for turn in ordered]
    oracle = oracle_cached_tokens(prompts, config.kv.block_size)
    whole = [replace(turn, oracle_tokens=tokens) for turn, tokens in zip(ordered, oracle, strict=True)]
    return Round(arm=arm, number=number, turns=whole, computed_tokens=computed)


def _computed_since(server: RunningServer, before: Mapping[str, float], due: float) -> dict[str, float]:
    """Prefill workers report now and then, so the last prompts come late; if they do not come, what is there."""
    deadline_s = time.monotonic() + REPORTED_WITHIN_S
    while True:
        computed = {worker: total - before[worker] for worker, total in computed_by_worker(server).items()}
        if sum(computed.values()) >= due or time.monotonic() > deadline_s:
            return computed
        time.sleep(0.1)


def arranged(config: Config, plan: Plan, arm: Arm) -> Config:
    return replace(
        config,
        mode="disaggregated",
        prefill=replace(config.prefill, replicas=plan.num_prefill),
        decode=replace(config.decode, replicas=1),
        kv=replace(config.kv, num_blocks=plan.num_blocks),
        routing=replace(config.routing, policy=arm.policy),
    )


def computed_by_worker(server: RunningServer) -> dict[str, float]:
    """Prompt tokens that each prefill worker has computed."""
    text = httpx.get(f"{server.http}/metrics", trust_env=False).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    prefills = {
        sample.labels["worker"]
        for sample in samples
        if sample.name == "moonshard_worker_info" and sample.labels["role"] == "prefill"
    }
    return {
        sample.labels["worker"]: sample.value
        for sample in samples
        if sample.name == PREFILL_TOKENS and sample.labels["worker"] in prefills
    }


async def _load(server: RunningServer, plan: Plan, arm: Arm, number: int, sessions: Sequence[Session]) -> list[Turn]:
    """Each client takes the next session when its last one has ended."""
    left = list(enumerate(sessions))[::-1]
    turns: list[Turn] = []
    async with AsyncClient(server.grpc) as client, asyncio.TaskGroup() as group:

        async def one_after_another(random: Random) -> None:
            while left:
                session, prompts = left.pop()
                for index, prompt in enumerate(prompts):
                    turns.append(await _turn(client, plan, arm, session, index, prompt))
                    await asyncio.sleep(random.expovariate(1 / plan.mean_think_s))  # the user's, not a wait for us

        for index in range(plan.num_clients):
            group.create_task(one_after_another(Random(f"{plan.seed} {number} {index}")))
    return turns


async def _turn(client: AsyncClient, plan: Plan, arm: Arm, session: int, index: int, prompt: Sequence[int]) -> Turn:
    metadata = ((SESSION_HEADER, f"session {session}"),) if arm.names_sessions else ()
    sent_s, first_s = time.perf_counter(), None
    async with client.stream(
        list(prompt), max_tokens=plan.max_tokens, temperature=0.0, ignore_eos=True, metadata=metadata
    ) as stream:
        async for _ in stream:
            first_s = first_s or time.perf_counter()
    return Turn(
        session=session,
        index=index,
        sent_s=sent_s,
        prompt_tokens=len(prompt),
        cached_tokens=stream.summary.usage.cached_tokens,
        ttft_ms=1e3 * ((first_s or time.perf_counter()) - sent_s),
    )
