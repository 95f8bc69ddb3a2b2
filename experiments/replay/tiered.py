"""The replay with tiers below the workers' caches: where blocks are found again, what moves, and when answers begin.

As `replay`, but that only full blocks count, since only they have names. A request's TTFT is the wait for what is
fetched, the queue it finds then, and its own uncached tokens. The trace goes on as it is, however late its answers are.
"""

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest
from moonshard.experiments.replay.replay import ReplayConfig, ask_of, in_time, num_known
from moonshard.experiments.replay.tiered_worker import Asked, Served, TieredWorker
from moonshard.experiments.replay.tiers import TierConfig, new_tier
from moonshard.serving.control.routing.policies import policy_of
from moonshard.serving.control.routing.router import Home, Router

BLOCK_BYTES = BLOCK_TOKENS * 70_272  # of Kimi K2: 61 layers of 576 features of 2 bytes a token


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredConfig:
    routing: ReplayConfig
    tiers: tuple[TierConfig, ...]  # the nearest first
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Ttft:
    """Of some requests; zeros where there are none."""

    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TierFigures:
    """Of the tiers of one name, of all workers together."""

    name: str
    hit_rate: float  # of all blocks: those that came up from there and were used
    bytes_up: int
    bytes_down: int  # also what came up from a tier behind it
    num_evicted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredReplayed:
    num_requests: int
    hit_rate: float  # of full blocks, as all rates
    device_hit_rate: float
    oracle_hit_rate: float
    tiers: tuple[TierFigures, ...]
    ttft: Ttft
    later_ttft: Ttft  # of requests that go on where an earlier prompt ended
    load_max_over_mean: float  # of uncached prompt tokens, by worker
    decisions_per_s: float


@dataclass(slots=True)
class _Oracle:
    """One cache without bound that sees all requests."""

    known: set[bytes] = field(default_factory=set)
    ends: set[bytes] = field(default_factory=set)  # where prompts ended
    num_hits: int = 0
    num_blocks: int = 0

    def see(self, names: Sequence[bytes]) -> bool:
        """Whether this goes on where an earlier prompt ended."""
        num_hits = num_known(names, self.known)
        is_later = num_hits > 0 and names[num_hits - 1] in self.ends
        self.num_hits += num_hits
        self.num_blocks += len(names)
        self.known.update(names)
        self.ends.update(names[-1:])
        return is_later


class _Fleet:
    """The router and its workers, and the requests that wait for what is fetched."""

    def __init__(self, config: TieredConfig):
        routing = config.routing
        self._router = Router(queue_weight=routing.queue_weight)
        self._choose = policy_of(routing.policy)
        self._homes = tuple(Home(f"worker-{index}", 0) for index in range(routing.num_workers))
        shared = {tier.name: new_tier(tier) for tier in config.tiers if tier.is_shared}
        self.tiers = [shared[tier.name] for tier in config.tiers if tier.is_shared]
        self.workers = dict[Home, TieredWorker]()
        for home in self._homes:
            tiers = [shared[tier.name] if tier.is_shared else new_tier(tier) for tier in config.tiers]
            self.tiers += [tier for tier in tiers if not tier.is_shared]
            self.workers[home] = TieredWorker(
                home, self._router, tiers, tokens_per_s=routing.tokens_per_s, max_blocks=routing.blocks_per_worker
            )
        self._waiting = list[tuple[float, int, Home, Asked]]()  # a heap
        self._num_asked = 0
        self.decided_s = 0.0  # how long all decisions took

    def arrive(self, request: TracedRequest, names: Sequence[bytes]) -> int:
        """Sends a request to a worker. Its number."""
        now_s = request.timestamp_ms / 1e3
        for worker in self.workers.values():
            worker.report(now_s)
        home = self._decide(request, names, now_s)
        asked = self.workers[home].ask(request.input_tokens, names, now_s)
        self._num_asked += 1
        heapq.heappush(self._waiting, (asked.begins_s, self._num_asked - 1, home, asked))
        return self._num_asked - 1

    def begun(self, until_s: float) -> Iterator[tuple[int, Served]]:
        """Begins what begins until then, in order of time."""
        while self._waiting and self._waiting[0][0] <= until_s:
            _, number, home, asked = heapq.heappop(self._waiting)
            yield number, self.workers[home].begin(asked)

    def _decide(self, request: TracedRequest, names: Sequence[bytes], now_s: float) -> Home:
        ask = ask_of(request, names)
        start_s = time.perf_counter()
        reservation = self._router.reserve(self._homes, ask, policy=self._choose, now_s=now_s)
        self.decided_s += time.perf_counter() - start_s
        assert reservation is not None  # there are homes
        self._router.sent(reservation, now_s=now_s)
        self._router.release(reservation)
        return reservation.home


def replay_tiered(requests: Sequence[TracedRequest], config: TieredConfig) -> TieredReplayed:
    """Replays the trace. ValueError for a trace without requests, or without full blocks."""
    if not any(request.input_tokens >= BLOCK_TOKENS for request in requests):
        raise ValueError("the trace has no requests of a full block")
    fleet, oracle = _Fleet(config), _Oracle()
    is_later = list[bool]()
    served = dict[int, Served]()
    for request, names, _ in in_time(requests):
        names = names[: request.input_tokens // BLOCK_TOKENS]
        served.update(fleet.begun(request.timestamp_ms / 1e3))
        is_later.append(oracle.see(names))
        fleet.arrive(request, names)
    served.update(fleet.begun(float("inf")))
    return _figures(fleet, oracle, [served[number] for number in range(len(requests))], is_later, config)


def _figures(
    fleet: _Fleet, oracle: _Oracle, served: Sequence[Served], is_later: Sequence[bool], config: TieredConfig
) -> TieredReplayed:
    num_blocks = oracle.num_blocks
    tiers = tuple(_tier_figures(tier.name, fleet, served, num_blocks, config.block_bytes) for tier in config.tiers)
    device_hit_rate = sum(one.num_at_hand for one in served) / num_blocks
    loads = [worker.num_computed_tokens for worker in fleet.workers.values()]
    return TieredReplayed(
        num_requests=len(served),
        hit_rate=device_hit_rate + sum(tier.hit_rate for tier in tiers),
        device_hit_rate=device_hit_rate,
        oracle_hit_rate=oracle.num_hits / num_blocks,
        tiers=tiers,
        ttft=_ttft([one.ttft_s for one in served]),
        later_ttft=_ttft([one.ttft_s for one, is_one in zip(served, is_later, strict=True) if is_one]),
        load_max_over_mean=max(loads) * len(loads) / sum(loads),
        decisions_per_s=len(served) / fleet.decided_s,
    )


def _tier_figures(name: str, fleet: _Fleet, served: Sequence[Served], num_blocks: int, block_bytes: int) -> TierFigures:
    counters = [tier.counters for tier in fleet.tiers if tier.name == name]
    return TierFigures(
        name=name,
        hit_rate=sum(one.num_by_tier.get(name, 0) for one in served) / num_blocks,
        bytes_up=block_bytes * sum(one.num_hits for one in counters),
        bytes_down=block_bytes * sum(one.num_kept for one in counters),
        num_evicted=sum(one.num_evicted for one in counters),
    )


def _ttft(seconds: Sequence[float]) -> Ttft:
    ordered = sorted(seconds) or [0.0]
    p50_s, p95_s, p99_s = (ordered[len(ordered) * percent // 100] for percent in (50, 95, 99))
    return Ttft(p50_s=p50_s, p95_s=p95_s, p99_s=p99_s)
