"""The load of `apart`, and what its clients saw: long prompts with short outputs, short ones with long outputs.

A Poisson process, open loop, at shares of what one engine does when all requests are there at once: a card's own
measure, since nobody knows beforehand how fast it is. Every arm gets the same requests at the same times.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from moonshard.experiments.bench.gpu.serving.apart import APART, Apart, OnDone, Together
from moonshard.experiments.bench.gpu.serving.clients import Build, Heard, serve
from moonshard.experiments.bench.gpu.serving.engines import EnginePair, EngineSizes, ignore
from moonshard.experiments.bench.gpu.serving.steps import StepRows
from moonshard.experiments.workload.arrivals import arrivals
from moonshard.serving.control.request import Request
from moonshard.serving.control.sampling_parameters import Sampling

WORTH_WAITING = 2.0  # a chunk size is no candidate for the best where TTFT's p90 is so many times the lowest


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Kinds of requests, each with its prompt tokens, output tokens, and number of requests."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    num_requests: tuple[int, ...]

    @property
    def max_context_tokens(self) -> int:
        return max(prompt + output for prompt, output in zip(self.prompt_tokens, self.output_tokens, strict=True))

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold all requests at once, each to its last token."""
        kinds = zip(self.prompt_tokens, self.output_tokens, self.num_requests, strict=True)
        return sum(count * -(-(prompt + output) // block_size) for prompt, output, count in kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlan:
    """What is served, and on what. The engine that only prefills uses the last of the chunk sizes."""

    mix: Mix
    sizes: EngineSizes
    shares_of_capacity: tuple[float, ...]
    num_repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRun:
    """One arm at one rate, over all repeats."""

    arm: str
    rate_per_s: float
    repeats: tuple[tuple[Heard, ...], ...]
    num_alike: int  # requests whose tokens are those of the first arm: bf16 leaves near ties, which the batch decides

    @property
    def heard(self) -> list[Heard]:
        return [one for repeat in self.repeats for one in repeat]

    def itl_ms(self, share: float) -> float:
        """A quantile of all gaps between tokens, first gaps included."""
        return _quantile([gap for one in self.heard for gap in one.gaps_ms], share)

    def first_gap_ms(self, share: float) -> float:
        """A quantile of the gaps between token 1 and token 2; with two engines, of the handoff."""
        return _quantile([one.gaps_ms[0] for one in self.heard], share)

    def ttft_ms(self, share: float) -> float:
        return _quantile([one.ttft_ms for one in self.heard], share)

    @property
    def itl_p90_of_repeats_ms(self) -> list[float]:
        return [_quantile([gap for one in repeat for gap in one.gaps_ms], 0.9) for repeat in self.repeats]


def draw_requests(mix: Mix, vocab_size: int, random: Random) -> list[Request]:
    """Greedy requests of random tokens, in a random order; no two begin alike."""
    kinds = zip(mix.prompt_tokens, mix.output_tokens, mix.num_requests, strict=True)
    sizes = [(prompt, output) for prompt, output, count in kinds for _ in range(count)]
    random.shuffle(sizes)
    return [
        Request(
            id=random.randbytes(16),
            prompt=tuple(random.randrange(vocab_size) for _ in range(num_prompt)),
            sampling=Sampling(temperature=0.0),
            max_tokens=num_output,
        )
        for num_prompt, num_output in sizes
    ]


def draw_arrivals(requests: Sequence[Request], rate_per_s: float, random: Random) -> list[tuple[float, Request]]:
    """Each request with its seconds after the start, ascending: a Poisson process that begins with the first one."""
    return list(zip(arrivals(rate_per_s, 1.0, len(requests), random), requests, strict=True))


def arms(pair: EnginePair) -> dict[str, Callable[[OnDone], Build]]:
    """The arms by name, each with a function that builds it on the running event loop; `APART` is the last."""
    found: dict[str, Callable[[OnDone], Build]] = {
        f"both, chunks of {chunk}": functools.partial(_both, pair, chunk) for chunk in pair.sizes.chunk_tokens
    }
    return {**found, APART: functools.partial(_apart, pair, pair.sizes.chunk_tokens[-1])}


def _both(pair: EnginePair, chunk_tokens: int, on_done: OnDone) -> Build:
    return lambda hear: Together(pair, chunk_tokens, hear, on_done)


def _apart(pair: EnginePair, chunk_tokens: int, on_done: OnDone) -> Build:
    return lambda hear: Apart(pair, chunk_tokens, hear, on_done)


def measure_capacity(pair: EnginePair, mix: Mix, seed: int) -> float:
    """Requests a second of one engine with its largest chunks, given all requests at once. This warms it up too."""
    requests = draw_requests(mix, pair.vocab_size, Random(f"{seed} capacity"))
    build = arms(pair)[f"both, chunks of {pair.sizes.chunk_tokens[-1]}"](ignore)
    start_ns = time.perf_counter_ns()
    heard = asyncio.run(serve(build, [(0.0, request) for request in requests]))
    return len(heard) / ((max(one.arrivals_ns[-1] for one in heard) - start_ns) / 1e9)


def measure_arms(pair: EnginePair, plan: ServingPlan, rate_per_s: float, steps: StepRows, seed: int) -> list[ArmRun]:
    """All arms at one rate. They take turns, in another order in each repeat. Their steps are added to `steps`."""
    built, found = arms(pair), dict[str, list[tuple[Heard, ...]]]()
    for repeat in range(plan.num_repeats):
        random = Random(f"{seed} {rate_per_s} {repeat}")
        timed = draw_arrivals(draw_requests(plan.mix, pair.vocab_size, random), rate_per_s, random)
        names = list(built)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            heard = asyncio.run(serve(built[name](steps.of_run(name)), timed))
            found.setdefault(name, []).append(tuple(heard))
    first = next(iter(built))
    return [
        ArmRun(
            arm=name,
            rate_per_s=rate_per_s,
            repeats=tuple(found[name]),
            num_alike=sum(map(num_alike, found[name], found[first])),
        )
        for name in built
    ]


def num_alike(some: Sequence[Heard], others: Sequence[Heard]) -> int:
    """How many requests got the same tokens in both runs, which hold the same requests in the same order."""
    return sum(one.tokens == other.tokens for one, other in zip(some, others, strict=True))


def best_of(runs: Sequence[ArmRun]) -> ArmRun:
    """The aggregated arm with the lowest p90 of gaps, among those whose p90 of TTFT is near the lowest."""
    both = [run for run in runs if run.arm != APART]
    soonest_ms = min(run.ttft_ms(0.9) for run in both)
    return min((run for run in both if run.ttft_ms(0.9) <= WORTH_WAITING * soonest_ms), key=lambda run: run.itl_ms(0.9))


def _quantile(samples: Sequence[float], share: float) -> float:
    return float(np.quantile(samples, share))
