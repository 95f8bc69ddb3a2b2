"""The rows of the table beside peers: what is asked of a server, and what the answers say.

A row asks the same of every server; a run of it gives one figure for each request, or one for all of them. What a row
must do at the least belongs to `bench.floors`.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from moonshard.experiments.bench.peers.completions import Answer, Connection, ask
from moonshard.experiments.common.running.measurement import Plan, Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Where prompts of one run come from: the same for every server that the run is for."""

    random: Random
    ids: Sequence[int]  # that prompts are made of

    def prompt(self, num_tokens: int) -> list[int]:
        return self.random.choices(self.ids, k=num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """So many streams at once; of each the mean time of a token after its first."""

    batch: int
    prompt_tokens: int
    completion_tokens: int
    unit: Unit = "ms"

    @property
    def name(self) -> str:
        return f"ITL, batch {self.batch}"

    async def run(self, connection: Connection, draw: Draw) -> list[float]:
        prompts = [draw.prompt(self.prompt_tokens) for _ in range(self.batch)]
        answers = await _together([_ask_all(connection, [prompt], self.completion_tokens) for prompt in prompts])
        return [answer.itl_ms for answer in answers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilling:
    """A fresh prompt by itself; its tokens by the time to the first of the answer."""

    prompt_tokens: int
    unit: Unit = "tokens/s"

    @property
    def name(self) -> str:
        return f"prefill, {self.prompt_tokens:,} tokens"

    async def run(self, connection: Connection, draw: Draw) -> list[float]:
        answer = await ask(connection, draw.prompt(self.prompt_tokens), 1)
        return [self.prompt_tokens / answer.ttft_ms * 1e3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cached:
    """TTFT of a prompt that was answered a moment before. That first time does not count."""

    prompt_tokens: int
    repeats: int
    unit: Unit = "ms"

    @property
    def name(self) -> str:
        return f"TTFT, {self.prompt_tokens:,} tokens cached"

    async def run(self, connection: Connection, draw: Draw) -> list[float]:
        prompt = draw.prompt(self.prompt_tokens)
        answers = await _ask_all(connection, [prompt] * (1 + self.repeats), 1)
        return [answer.ttft_ms for answer in answers[1:]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """Clients that send their next request when the last one has ended; all tokens of the answers by the whole time."""

    num_requests: int
    num_clients: int
    prompt_tokens: int
    completion_tokens: int
    unit: Unit = "tokens/s"

    @property
    def name(self) -> str:
        each = f"{self.num_requests} requests of {self.prompt_tokens} + {self.completion_tokens}"
        return f"output tokens, {each} at {self.num_clients}"

    async def run(self, connection: Connection, draw: Draw) -> list[float]:
        prompts = [draw.prompt(self.prompt_tokens) for _ in range(self.num_requests)]
        shares = [prompts[client :: self.num_clients] for client in range(self.num_clients)]
        begun_s = time.perf_counter()
        answers = await _together([_ask_all(connection, share, self.completion_tokens) for share in shares])
        return [sum(answer.num_tokens for answer in answers) / (time.perf_counter() - begun_s)]


Row = Decoding | Prefilling | Cached | ClosedLoop


def warm_up_of(row: Row) -> Row:
    """What is run before the first sample, and does not count."""
    return replace(row, num_requests=row.num_clients) if isinstance(row, ClosedLoop) else row


def rows_of(plan: Plan) -> tuple[Row, ...]:
    """The rows of a plan, in the order of the table."""
    prompts = plan.compared_prompts
    return (
        *(
            Decoding(batch=batch, prompt_tokens=plan.context_tokens[0], completion_tokens=plan.compared_tokens)
            for batch in plan.batches
        ),
        *(Prefilling(prompt_tokens=num_tokens) for num_tokens in prompts),
        ClosedLoop(
            num_requests=plan.loop_requests,
            num_clients=plan.loop_clients,
            prompt_tokens=prompts[0],
            completion_tokens=plan.loop_tokens,
        ),
        *(Cached(prompt_tokens=num_tokens, repeats=plan.cached_repeats) for num_tokens in prompts),
    )


def seconds_of(row: Row, figure: float) -> float:
    """How long that took of which `bench.floors.asked` says the least."""
    match row:
        case Decoding() | Cached():
            return figure / 1e3
        case Prefilling():
            return row.prompt_tokens / figure
        case ClosedLoop():
            return row.num_requests * row.completion_tokens / figure


async def _ask_all(connection: Connection, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """One after another."""
    return [await ask(connection, prompt, max_tokens) for prompt in prompts]


async def _together(clients: Sequence) -> list[Answer]:
    """All at once. The first failure ends them all, and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client) for client in clients]
    except* Exception as failures:
        raise _first(failures) from None
    return [answer for task in tasks for answer in task.result()]


def _first(failures: BaseExceptionGroup) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
