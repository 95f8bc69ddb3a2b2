"""What a grammar costs: the same streams with and without one, all at once, on one server.

All streams of an arm keep to the same kind of grammar, and none can end early. Arms take turns, so that what disturbs
the machine disturbs all of them. Prompts are fresh random tokens; each grammar is compiled before what counts. What
drafts make of grammars is not measured here.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from moonshard.experiments.bench.serving.streams import Seen, ask_grpc, random_prompt
from moonshard.experiments.common.grid import Grid, number
from moonshard.experiments.common.running.deployment import deployed
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.server import RunningServer
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.types import StructuredOutputs
from moonshard.serving.config.keys import Config

FREE = "no grammar"
STRINGS = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 5000}
RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["a", "bc", "def"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
    "minItems": 5000,
}
GRAMMARS: Mapping[str, StructuredOutputs | None] = {
    FREE: None,
    "regex, lower-case words": {"regex": "[a-z ]{20000,}"},
    "JSON schema, an array of strings": {"json_schema": json.dumps(STRINGS)},
    "JSON schema, an array of records": {"json_schema": json.dumps(RECORDS)},
}
BAR = 1.1  # times the median gap without a grammar
COLUMNS = ("all streams with", "streams", "ITL p50, ms", "p90", "p99", "of no grammar's p50", "p99", f"bar {BAR}", "n")


def measure_constrained(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Raises ServerFailed."""
    aggregated = replace(config, mode="aggregated", decode=replace(config.decode, max_slots=max(plan.batches)))
    with deployed(aggregated, environment) as deployment:
        return asyncio.run(_rounds(deployment.server, plan))


async def _rounds(server: RunningServer, plan: Plan) -> list[Measurement]:
    found: list[Measurement] = []
    async with AsyncClient(server.grpc) as client:
        vocab_size = (await client.model_info()).vocab_size
        for index in range(plan.constrained_rounds + 1):
            for num_streams in (1, max(plan.batches)):
                for name, outputs in GRAMMARS.items():
                    seen = await _streams(client, num_streams, plan, vocab_size, f"{index} {name}", outputs)
                    if index:  # the first round compiles, and fills what is kept
                        found.append(_measurement(name, num_streams, seen))
    return found


async def _streams(
    client: AsyncClient, num_streams: int, plan: Plan, vocab_size: int, seed: str, outputs: StructuredOutputs | None
) -> list[Seen]:
    random, num_tokens = Random(seed), plan.completion_tokens
    prompts = [random_prompt(random, vocab_size, plan.context_tokens[0]) for _ in range(num_streams)]
    return await asyncio.gather(*(ask_grpc(client, prompt, num_tokens, outputs) for prompt in prompts))


def _measurement(name: str, num_streams: int, seen: Sequence[Seen]) -> Measurement:
    """Gaps from when all streams decode on: what came before has the others' prompts in it."""
    all_begun_ns = max(each.arrivals_ns[0] for each in seen)
    gaps = [
        (after - before) / 1e6
        for each in seen
        for before, after in zip(each.arrivals_ns, each.arrivals_ns[1:], strict=False)
        if before >= all_begun_ns
    ]
    return Measurement(level="constrained", name=_name(name, num_streams), unit="ms", samples=tuple(gaps))


def constrained_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    found = {one.name: one for one in measurements if one.level == "constrained"}
    rows = []
    for num_streams in (1, max(plan.batches)):
        free = found.get(_name(FREE, num_streams))
        for name in GRAMMARS:
            one = found.get(_name(name, num_streams))
            if one is None or free is None:
                continue
            ratio = one.median / free.median
            verdict = "" if name == FREE else "held" if ratio <= BAR else "missed"
            quantiles = [number(one.quantile(q)) for q in (0.5, 0.9, 0.99)]
            ratios = [f"{ratio:.2f}", f"{one.quantile(0.99) / free.quantile(0.99):.2f}"]
            rows.append((name, str(num_streams), *quantiles, *ratios, verdict, str(len(one.samples))))
    notes = (
        f"Constrained: {plan.context_tokens[0]} prompt tokens, {plan.completion_tokens} generated, greedy; gaps count "
        f"once all streams decode; {plan.constrained_rounds} rounds, arms in turn on one aggregated server.",
    )
    return Grid(title="What grammars cost", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())


def _name(grammar: str, num_streams: int) -> str:
    return f"ITL, {grammar}, {num_streams}"
