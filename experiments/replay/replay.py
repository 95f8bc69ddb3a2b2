"""The router alone over a trace: how much of the prompts it finds again, and how evenly it shares out the rest.

Time is the trace's. A worker is a queue of uncached prompt tokens that drains at a constant rate, and a cache of blocks
that is not bounded unless asked. Every decision is the real router's, fed as workers would feed it: their queues, and
the blocks that they know. The oracle is one cache without bound that sees all requests.
"""

import itertools
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest
from moonshard.experiments.replay.cache import ToldCache
from moonshard.serving.control.routing.names import QUEUE_WEIGHT, PolicyName
from moonshard.serving.control.routing.policies import policy_of
from moonshard.serving.control.routing.router import Ask, Home, Router

NUMBER_BYTES = 8  # of a block in the trace, which stands for its name


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    num_workers: int = 8
    policy: PolicyName = "cost"
    tokens_per_s: float = 6000.0  # of prompts, per worker
    blocks_per_worker: int | None = None
    queue_weight: float = QUEUE_WEIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    num_requests: int
    hit_rate: float  # of blocks
    oracle_hit_rate: float
    load_max_over_mean: float  # of uncached prompt tokens, by worker
    decisions_per_s: float
    decision_p50_us: float
    decision_p99_us: float


@dataclass(slots=True)
class _Worker:
    """A worker's queue and its cache."""

    home: Home
    cache: ToldCache
    queued_tokens: float = 0.0
    computed_tokens: int = 0

    def drain(self, num_tokens: float) -> None:
        self.queued_tokens = max(0.0, self.queued_tokens - num_tokens)

    def take(self, request: TracedRequest, names: Sequence[bytes]) -> int:
        """Queues what it does not have of the request; returns how many of the first names it has."""
        num_known = self.cache.num_known(names)
        left = max(1, request.input_tokens - num_known * BLOCK_TOKENS)
        self.queued_tokens += left
        self.computed_tokens += left
        self.cache.use(names)
        return num_known


def replay(requests: Sequence[TracedRequest], config: ReplayConfig) -> Replayed:
    """Replays the trace. ValueError for a trace without requests."""
    if not requests:
        raise ValueError("the trace has no requests")
    router = Router(queue_weight=config.queue_weight)
    choose = policy_of(config.policy)
    homes = tuple(Home(f"worker-{index}", 0) for index in range(config.num_workers))
    workers = [
        _Worker(home, ToldCache(router.index, router.home_number(home), config.blocks_per_worker)) for home in homes
    ]
    oracle: set[bytes] = set()
    num_hits = num_oracle_hits = num_blocks = 0
    took_s: list[float] = []
    for request, names, elapsed_s in in_time(requests):
        for worker in workers:
            worker.drain(elapsed_s * config.tokens_per_s)
            router.report(worker.home, round(worker.queued_tokens))
        ask = ask_of(request, names)
        start_s = time.perf_counter()
        reservation = router.reserve(homes, ask, policy=choose, now_s=request.timestamp_ms / 1e3)
        took_s.append(time.perf_counter() - start_s)
        assert reservation is not None  # there are homes
        router.sent(reservation, now_s=request.timestamp_ms / 1e3)
        router.release(reservation)
        num_hits += workers[homes.index(reservation.home)].take(request, names)
        num_oracle_hits += num_known(names, oracle)
        oracle.update(names)
        num_blocks += len(names)
    loads = [worker.computed_tokens for worker in workers]
    took_s.sort()
    return Replayed(
        num_requests=len(requests),
        hit_rate=num_hits / num_blocks,
        oracle_hit_rate=num_oracle_hits / num_blocks,
        load_max_over_mean=max(loads) * len(loads) / sum(loads),
        decisions_per_s=len(took_s) / sum(took_s),
        decision_p50_us=took_s[len(took_s) // 2] * 1e6,
        decision_p99_us=took_s[len(took_s) * 99 // 100] * 1e6,
    )


def ask_of(request: TracedRequest, names: Sequence[bytes]) -> Ask:
    """What the router is told of it: the prefill alone, and the names of its full blocks."""
    return Ask(
        num_tokens=request.input_tokens,
        num_prompt=request.input_tokens,
        is_prefill=True,
        names=names[: request.input_tokens // BLOCK_TOKENS],
        block_size=BLOCK_TOKENS,
    )


def num_known(names: Sequence[bytes], known: Container[bytes]) -> int:
    """How many of the first names are known."""
    return sum(1 for _ in itertools.takewhile(known.__contains__, names))


def in_time(requests: Sequence[TracedRequest]) -> Iterator[tuple[TracedRequest, list[bytes], float]]:
    """Each request with its blocks' names, and the seconds since the one before."""
    before_ms = requests[0].timestamp_ms
    for request in requests:
        names = [block.to_bytes(NUMBER_BYTES, "little") for block in request.blocks]
        yield request, names, (request.timestamp_ms - before_ms) / 1e3
        before_ms = request.timestamp_ms
