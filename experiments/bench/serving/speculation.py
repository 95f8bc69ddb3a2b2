"""What guesses are worth: the same turns on servers that differ in what guesses, side by side.

The embedded model answers held-out turns of its own generator, greedily, to their end: turns that call a tool, turns of
agents in whose sessions the arguments stand already, requests to repeat a text. All servers run at once and take turns,
task by task, so that what disturbs the machine disturbs all of them. All should say the same tokens, but for near ties
of logits; the share of turns that did is told. A prompt is asked of a server twice, and the first time is not counted:
what is measured is decoding, with the prompt in the cache.
"""

import asyncio
import itertools
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
COLUMNS = ("turns", "streams", "guesses", "ms a token, p50", "times as fast", "tokens a guess", "same tokens", "n")
KINDS = ("tool calls", "agents' calls", "texts to repeat")
NUM_BATCHES = 2  # of the plan's: more streams than these hardly ever gain
LEVEL, TOKENS_A_STEP, SAME = "speculation", ": tokens a step", ": same"

type _Answer = tuple[Seen, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Arm:
    name: str
    client: AsyncClient
    server: RunningServer

    def counters(self) -> tuple[float, float]:
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
        decode=replace(config.decode, max_slots=max(plan.batches[:NUM_BATCHES])),
        worker=replace(config.worker, prepare="all"),  # nothing is compiled beside what is measured
        speculation=SpeculationConfig(method=methods),
    )


def turns_of(num: int) -> dict[str, list[Task]]:
    """At most so many held-out turns of each of `KINDS`."""
    calling = [task for task in tool_tasks(0, 4 * num) if task.rounds]
    copying = [copy_conversation(random_of(HELD_OUT, 0, "copy", index), HELD_OUT, COPY_TOKENS) for index in range(num)]
    found = (
        [task for task in calling if task.kind == "tools"][:num],
        [task for task in calling if task.kind == "agents"][:num],
        [cut("copy", each, len(each.exchanges) - 1) for each in copying],
    )
    return dict(zip(KINDS, found, strict=True))


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
            for num_streams in plan.batches[:NUM_BATCHES]:
                found += await _measured(arms, kind, prompts, num_streams)
    return found


async def _asked(arms: Sequence[_Arm], prompts: Sequence[Sequence[int]], num_streams: int) -> dict[str, list[_Answer]]:
    """What each arm answers to all prompts, so many at once: arm by arm, before the next prompts."""
    answers: dict[str, list[_Answer]] = {arm.name: [] for arm in arms}
    for start in range(0, len(prompts), num_streams):
        for arm in arms:
            group = prompts[start : start + num_streams]
            answers[arm.name] += await asyncio.gather(*(ask_turn(arm.client, prompt) for prompt in group))
    return answers


async def _measured(
    arms: Sequence[_Arm], kind: str, prompts: Sequence[Sequence[int]], num_streams: int
) -> list[Measurement]:
    await _asked(arms, prompts, num_streams)
    before = {arm.name: arm.counters() for arm in arms}
    answers = await _asked(arms, prompts, num_streams)
    found: list[Measurement] = []
    for arm in arms:
        drafts, accepted = (now - then for now, then in zip(arm.counters(), before[arm.name], strict=True))
        pairs = zip(answers[arm.name], answers[WITHOUT], strict=True)
        name = _name(kind, num_streams, arm.name)
        per_token = (seen.decode_ms / (len(seen.arrivals_ns) - 1) for seen, _ in answers[arm.name] if seen.gaps_ms)
        same = (float(own == other) for (_, own), (_, other) in pairs)
        a_step = (1 + accepted / drafts if drafts else 1.0,)
        found += [
            Measurement(level=LEVEL, name=name, unit="ms", samples=tuple(per_token)),
            Measurement(level=LEVEL, name=name + TOKENS_A_STEP, unit="count", samples=a_step),
            Measurement(level=LEVEL, name=name + SAME, unit="share", samples=tuple(same)),
        ]
    return found


def _name(kind: str, num_streams: int, arm: str) -> str:
    return f"{kind}, {num_streams}, {arm}"


def speculation_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    found = {one.name: one for one in measurements if one.level == LEVEL}
    rows: list[tuple[str, ...]] = []
    for kind, num_streams, arm in itertools.product(KINDS, plan.batches[:NUM_BATCHES], ARMS):
        name, without = (_name(kind, num_streams, each) for each in (arm, WITHOUT))
        if name not in found:
            continue
        same = found[name + SAME].samples
        told = (
            number(found[name].median),
            f"{found[without].median / found[name].median:.2f}",
            number(found[name + TOKENS_A_STEP].median),
        )
        rows.append((kind, str(num_streams), arm, *told, f"{sum(same):.0f} of {len(same)}", str(len(same))))
    notes = (
        "Speculation: the embedded model, greedy, one aggregated server for each kind of guesses, all at once and in "
        "turns; ms a token between a turn's first token and its last; times as fast: as without guesses.",
    )
    return Grid(title="What guesses are worth", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())
