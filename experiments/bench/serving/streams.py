"""The clients of the benchmark: streams over gRPC and over HTTP, with a stamp for each token on the client's clock.

TTFT is from the call to the first token here, ITL the gap between messages with tokens, as `experiments.runner` has it,
E2E from the call to the end of the stream. Prompts are random token ids, fresh for each request, so that no cache of
prefixes can help.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import httpx

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.types import GenerateOptions, StructuredOutputs, Timing

TURN_TOKENS = 160  # of an answer, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One request as its client saw it."""

    sent_ns: int
    arrivals_ns: tuple[int, ...]  # of each token
    ended_ns: int
    timing: Timing | None  # the gateway's account; over HTTP there is none

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals_ns[0] - self.sent_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        return (self.ended_ns - self.sent_ns) / 1e6

    @property
    def gaps_ms(self) -> list[float]:
        """Times between tokens. Tokens of one message have no gap between them."""
        return [(after - before) / 1e6 for before, after in pairwise(self.arrivals_ns) if after > before]

    @property
    def decode_ms(self) -> float:
        return (self.arrivals_ns[-1] - self.arrivals_ns[0]) / 1e6


def random_prompt(random: Random, vocab_size: int, num_tokens: int) -> list[int]:
    return [random.randrange(vocab_size) for _ in range(num_tokens)]


async def ask_grpc(
    client: AsyncClient, prompt: Sequence[int], max_tokens: int, outputs: StructuredOutputs | None = None
) -> Seen:
    """One streamed request over gRPC, greedy, without an early end where nothing says when it is complete.

    RequestError if it is refused.
    """
    arrivals_ns: list[int] = []
    sent_ns = time.perf_counter_ns()
    asked: GenerateOptions = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": outputs is None}
    if outputs is not None:
        asked["structured_outputs"] = outputs
    async with client.stream(prompt, **asked) as stream:
        async for delta in stream:
            arrivals_ns += [time.perf_counter_ns()] * len(delta.token_ids)
        ended_ns = time.perf_counter_ns()
    return Seen(sent_ns=sent_ns, arrivals_ns=tuple(arrivals_ns), ended_ns=ended_ns, timing=stream.summary.timing)


async def ask_turn(client: AsyncClient, prompt: Sequence[int]) -> tuple[Seen, tuple[int, ...]]:
    """One streamed turn over gRPC, greedy, to its end; and the tokens that were said. RequestError if it is refused."""
    arrivals_ns, tokens = list[int](), list[int]()
    sent_ns = time.perf_counter_ns()
    async with client.stream(prompt, temperature=0.0, max_tokens=TURN_TOKENS) as stream:
        async for delta in stream:
            arrivals_ns += [time.perf_counter_ns()] * len(delta.token_ids)
            tokens += delta.token_ids
        ended_ns = time.perf_counter_ns()
    seen = Seen(sent_ns=sent_ns, arrivals_ns=tuple(arrivals_ns), ended_ns=ended_ns, timing=stream.summary.timing)
    return seen, tuple(tokens)


async def ask_http(http: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int) -> Seen:
    """One streamed request to /v1/completions, one chunk per token. httpx.HTTPStatusError if it is refused."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    arrivals_ns: list[int] = []
    sent_ns = time.perf_counter_ns()
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if _has_token(line):
                arrivals_ns += [time.perf_counter_ns()]
    ended_ns = time.perf_counter_ns()
    return Seen(sent_ns=sent_ns, arrivals_ns=tuple(arrivals_ns), ended_ns=ended_ns, timing=None)


def _has_token(line: str) -> bool:
    """Whether a line of the event stream is a chunk with a choice: not a blank, a comment, the usage or the end."""
    return line.startswith("data: {") and bool(json.loads(line.removeprefix("data: "))["choices"])


async def closed_loop(
    client: AsyncClient,
    *,
    num_clients: int,
    requests_per_client: int,
    prompt_tokens: int,
    max_tokens: int,
    vocab_size: int,
    seed: str,
) -> list[Seen]:
    """Each of the clients sends its next request when its last one has ended."""

    async def one_after_another(index: int) -> list[Seen]:
        random = Random(f"{seed} {index}")
        prompts = [random_prompt(random, vocab_size, prompt_tokens) for _ in range(requests_per_client)]
        return [await ask_grpc(client, prompt, max_tokens) for prompt in prompts]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_after_another(index)) for index in range(num_clients)]
    return [seen for task in tasks for seen in task.result()]
