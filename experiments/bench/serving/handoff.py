"""What a client waits for because its KV moves: the exposed part of the handoff, beside TTFT, for several lengths.

One request at a time on an idle deployment of one prefill and one decode worker, nothing pinned. The exposed part is
what comes after the first token: the rest of the transfer, landing, joining. The prompts' own prefill hides the rest.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from random import Random

from moonshard.experiments.bench.serving.streams import ask_grpc, random_prompt
from moonshard.experiments.common.grid import Grid, number, verdict
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.server import RunningServer
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.types import Timing

MAX_TOKENS = 4
BAR = 0.1  # of TTFT
SHARE = "exposed part / TTFT"


def exposed_ms(timing: Timing) -> float:
    return timing.exposed_transfer_ms + timing.land_ms + timing.join_ms


PARTS: Mapping[str, Callable[[Timing], float]] = {
    "TTFT": attrgetter("ttft_ms"),
    "transfer": attrgetter("transfer_ms"),
    "exposed transfer": attrgetter("exposed_transfer_ms"),
    "land": attrgetter("land_ms"),
    "join": attrgetter("join_ms"),
    "exposed part": exposed_ms,
    "handoff gap": attrgetter("handoff_gap_ms"),
}
COLUMNS = ("prompt tokens", *(f"{part}, ms" for part in PARTS), SHARE, "p90", "n", f"bar {BAR}")


def measure_handoffs(server: RunningServer, plan: Plan) -> list[Measurement]:
    """Measures the lengths in turn, so that a disturbance hits all. The first request of each is not counted."""
    timings = asyncio.run(_ask(server, plan))
    return [one for num_tokens, of_length in timings.items() for one in of_requests(num_tokens, of_length)]


def of_requests(num_tokens: int, timings: Sequence[Timing]) -> list[Measurement]:
    samples = {part: tuple(read(timing) for timing in timings) for part, read in PARTS.items()}
    shares = tuple(exposed_ms(timing) / timing.ttft_ms for timing in timings)
    return [
        *(
            Measurement(level="handoff", name=_name(part, num_tokens), unit="ms", samples=values)
            for part, values in samples.items()
        ),
        Measurement(level="handoff", name=_name(SHARE, num_tokens), unit="share", samples=shares),
    ]


async def _ask(server: RunningServer, plan: Plan) -> dict[int, list[Timing]]:
    timings: dict[int, list[Timing]] = {num_tokens: [] for num_tokens in plan.handoff_tokens}
    random = Random("handoff")
    async with AsyncClient(server.grpc) as client:
        vocab_size = (await client.model_info()).vocab_size
        for _ in range(plan.handoff_repeats + 1):
            for num_tokens, found in timings.items():
                seen = await ask_grpc(client, random_prompt(random, vocab_size, num_tokens), MAX_TOKENS)
                found += [seen.timing] if seen.timing is not None else []
    return {num_tokens: found[1:] for num_tokens, found in timings.items()}


def handoff_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """A row for each length, in medians; the share has its 90th percentile too."""
    rows = handoff_rows({one.name: one for one in measurements if one.level == "handoff"}, plan.handoff_tokens)
    notes = (
        "Handoff: medians on an idle system; the exposed part is exposed transfer + land + join; the handoff gap is "
        "token 1 to token 2 at the gateway, a decode step included.",
    )
    title = "The exposed part of a handoff"
    return Grid(title=title, columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())


def handoff_rows(found: Mapping[str, Measurement], lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """The cells of each length that was measured, as `COLUMNS`."""
    rows = []
    for num_tokens in lengths:
        if share := found.get(_name(SHARE, num_tokens)):
            medians = [number(found[_name(part, num_tokens)].median) for part in PARTS]
            spread = (f"{share.median:.3f}", f"{share.quantile(0.9):.3f}", str(len(share.samples)))
            rows.append((f"{num_tokens:,}", *medians, *spread, verdict(share.median <= BAR)))
    return rows


def _name(part: str, num_tokens: int) -> str:
    return f"{part}, {num_tokens} prompt tokens"
