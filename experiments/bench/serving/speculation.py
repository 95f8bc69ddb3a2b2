"""What guesses are worth: the same turns on servers that differ in what guesses, side by side.

The embedded model answers held-out turns of its own generator, greedily, to their end: turns that call a tool, turns of
agents in whose sessions the arguments stand already, requests to repeat a text. All servers run at once and take turns,
task by task, so that what disturbs the machine disturbs all of them; all of them say the same tokens. A prompt is asked
of a server twice, and the first time is not counted: what is measured is decoding, with the prompt in the cache.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from moonshard.experiments.bench.serving.streams import Seen, ask_turn
from moonshard.experiments.common.grid import Grid, number
from moonshard.experiments.common.running.deployment import deployed
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.server import RunningServer
from moonshard.experiments.training.texts.conversation import HELD_OUT, random_of
from moonshard.experiments.training.texts.copying import copy_conversation
from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.training.texts.tools.tasks import Task, cut, prompt_tokens, tool_tasks
from moonshard.rpc.client import AsyncClient
from moonshard.serving.config.keys import Config, GuessingMethod, SpeculationConfig, embedded_model_path

type Arms = Mapping[str, tuple[GuessingMethod, ...]]
WITHOUT = "without"
ARMS: Arms = {WITHOUT: (), "lookup": ("lookup",), "eagle3": ("eagle3",), "eagle3 and lookup": ("eagle3", "lookup")}
COPY_TOKENS = 400  # of a conversation that repeats texts
CONTEXT_TOKENS = 2048
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
COLUMNS = ("turns", "streams", "guesses", "ms a token, p50", "of without", "tokens a guessing step", "same tokens", "n")


@dataclass(frozen=True, slots=True)
class _Arm:
    name: str
    client: AsyncClient
    server: RunningServer

    def guesses(self) -> tuple[float, float]:
        """Rows that guessed so far, and guesses of theirs that were right."""
        text = httpx.get(f"{self.server.http}/metrics", trust_env=False).raise_for_status().text
        totals = dict.fromkeys((DRAFTS, ACCEPTED), 0.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in totals:
                    totals[sample.name] += sample.value
        return totals[DRAFTS], totals[ACCEPTED]


def measure_speculation(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Nothing for another model than the embedded one. Raises ServerFailed."""
    if config.model.path != embedded_model_path():
        return []
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(deployed(_config(config, methods, plan), environment)).server
            for name, methods in ARMS.items()
        }
        return asyncio.run(_all(servers, plan))


def _config(config: Config, methods: tuple[GuessingMethod, ...], plan: Plan) -> Config:
    return replace(
        config,
        mode="aggregated",
        model=replace(config.model, max_context_tokens=CONTEXT_TOKENS),
        decode=replace(config.decode, max_slots=max(plan.batches)),
        speculation=SpeculationConfig(method=methods),
    )


def turns_of(num: int) -> dict[str, list[Task]]:
    calling = [task for task in tool_tasks(0, 4 * num) if task.rounds]
    copying = [copy_conversation(random_of(HELD_OUT, 0, "copy", index), HELD_OUT, COPY_TOKENS) for index in range(num)]
    return {
        "tool calls": [task for task in calling if task.kind == "tools"][:num],
        "agents' calls": [task for task in calling if task.kind == "agents"][:num],
        "texts to repeat": [cut("copy", each, len(each.exchanges) - 1) for each in copying],
    }


async def _all(servers: Mapping[str, RunningServer], plan: Plan) -> list[Measurement]:
    found: list[Measurement] = []
    text = pocket_text()
    async with AsyncExitStack() as stack:
        arms = [
            _Arm(name, await stack.enter_async_context(AsyncClient(server.grpc)), server)
            for name, server in servers.items()
        ]
        for kind, tasks in turns_of(plan.speculation_turns).items():
            prompts = [prompt_tokens(text, task.messages, task.tools) for task in tasks]
            for num_streams in plan.batches[:2]:
                found += await _measured(arms, kind, prompts, num_streams)
    return found


async def _measured(
    arms: Sequence[_Arm], kind: str, prompts: Sequence[Sequence[int]], num_streams: int
) -> list[Measurement]:
    before = {arm.name: (0.0, 0.0) for arm in arms}
    seen: dict[str, list[Seen]] = {arm.name: [] for arm in arms}
    said: dict[str, list[tuple[int, ...]]] = {arm.name: [] for arm in arms}
    groups = [prompts[start : start + num_streams] for start in range(0, len(prompts), num_streams)]
    for is_counted in (False, True):
        before = {arm.name: arm.guesses() for arm in arms}
        for group in groups:
            for arm in arms:
                answers = await asyncio.gather(*(ask_turn(arm.client, prompt) for prompt in group))
                if is_counted:
                    seen[arm.name] += [one for one, _ in answers]
                    said[arm.name] += [tokens for _, tokens in answers]
    found: list[Measurement] = []
    for arm in arms:
        drafts, accepted = (now - then for now, then in zip(arm.guesses(), before[arm.name], strict=True))
        name = f"{kind}, {num_streams}, {arm.name}"
        per_token = [one.decode_ms / (len(one.arrivals_ns) - 1) for one in seen[arm.name] if len(one.arrivals_ns) > 1]
        same = [float(own == other) for own, other in zip(said[arm.name], said[WITHOUT], strict=True)]
        found += [
            Measurement(level="speculation", name=name, unit="ms", samples=tuple(per_token)),
            Measurement(
                level="speculation",
                name=f"{name}: tokens a step",
                unit="count",
                samples=(1 + accepted / drafts if drafts else 1.0,),
            ),
            Measurement(level="speculation", name=f"{name}: same", unit="share", samples=tuple(same)),
        ]
    return found


def speculation_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    found = {one.name: one for one in measurements if one.level == "speculation"}
    rows = []
    for name, one in found.items():
        if ": " in name:
            continue
        kind, num_streams, arm = name.split(", ")
        without = found[f"{kind}, {num_streams}, {WITHOUT}"]
        same = found[f"{name}: same"].samples
        told = [
            number(one.median),
            f"{without.median / one.median:.2f}",
            number(found[f"{name}: tokens a step"].median),
        ]
        rows.append((kind, num_streams, arm, *told, f"{sum(same):.0f} of {len(same)}", str(len(one.samples))))
    notes = (
        "Speculation: the embedded model, greedy, one aggregated server for each kind of guesses, all at once and in "
        "turns; ms a token between a turn's first token and its last; of without: how many times faster.",
    )
    return Grid(title="What guesses are worth", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())
