"""One worker of the replay that has tiers below its cache: what it fetches, computes, writes down and tells the router.

As the worker that serves does it (`serving.worker.store`), and with its parts: whether to fetch is
`control.tiers.fetches`', what goes down `control.tiers.writes`', which tier has what `kv.store.stack`'s. Time is an
argument. Simpler than there: blocks go down as soon as they are computed, a request whose blocks come does not wait for
one that fetches the same, and fetches do not slow each other down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonshard.experiments.common.trace_file import BLOCK_TOKENS
from moonshard.experiments.replay.cache import ToldCache
from moonshard.experiments.replay.tiers import NamesTier
from moonshard.kv.prefix import MAX_BELOW, Below, PrefixEvent, Spaces
from moonshard.kv.store.stack import Fetched, TierStack
from moonshard.serving.control.routing.router import Home, Router
from moonshard.serving.control.tiers.fetches import FetchPlan, FetchTimes, runs_of
from moonshard.serving.control.tiers.writes import WriteQueue

PIECE_BLOCKS = 8  # that are written down together
MAX_QUEUED_BLOCKS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request that begins once what is fetched for it is there, or is waited for no longer."""

    num_tokens: int
    names: Sequence[bytes]  # of its full blocks
    asked_s: float
    begins_s: float
    num_at_hand: int  # of the first blocks, when it was asked
    fetched: Fetched | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    num_at_hand: int  # blocks that the device's cache had
    num_by_tier: Mapping[str, int]  # blocks that came up
    num_computed_tokens: int
    ttft_s: float


class TieredWorker:
    def __init__(
        self,
        home: Home,
        router: Router,
        tiers: Sequence[NamesTier],
        *,
        tokens_per_s: float,
        max_blocks: int | None,
    ):
        self.home = home
        self._router = router
        self._tokens_per_s = tokens_per_s
        spaces = Spaces(num_partitions=1)
        self._own, self._shared = (Home(home.worker, spaces.below(below, 0)) for below in (Below.OWN, Below.SHARED))
        self._cache = ToldCache(router.index, router.home_number(home), max_blocks)
        self._below = {
            below: ToldCache(router.index, router.home_number(space), MAX_BELOW)
            for below, space in ((Below.OWN, self._own), (Below.SHARED, self._shared))
        }
        self._tiers = {tier.name: tier for tier in tiers}
        self._stack = TierStack(tiers)
        self._times = FetchTimes(BLOCK_TOKENS)
        self._queue = WriteQueue(MAX_QUEUED_BLOCKS, partitions=range(1), tiers=self._stack.names)
        self._computed_by_s = 0.0  # when all that has begun is computed
        self._waiting_tokens = 0  # of prompts that have not begun
        self.num_computed_tokens = 0

    def queued_tokens(self, now_s: float) -> int:
        return round(max(0.0, self._computed_by_s - now_s) * self._tokens_per_s)

    def report(self, now_s: float) -> None:
        """Tells the router what a worker's report does."""
        self._router.report(self.home, self.queued_tokens(now_s) + self._waiting_tokens)
        shares = dict.fromkeys(Below, 1.0)
        for tier in self._tiers:
            shares[self._below_of(tier)] = self._times.share(tier)
        self._router.fetches([self.home], self._own, self._shared, shares[Below.OWN], shares[Below.SHARED])

    def ask(self, num_tokens: int, names: Sequence[bytes], now_s: float) -> Asked:
        num_at_hand = self._cache.num_known(names)
        fetched, wait_s = self._fetch(names[num_at_hand:], now_s)
        self._waiting_tokens += len(names) * BLOCK_TOKENS
        return Asked(
            num_tokens=num_tokens,
            names=names,
            asked_s=now_s,
            begins_s=now_s + wait_s,
            num_at_hand=num_at_hand,
            fetched=fetched,
        )

    def begin(self, asked: Asked) -> Served:
        """At the time when it begins."""
        names = asked.names
        self._waiting_tokens -= len(names) * BLOCK_TOKENS
        num_at_hand = self._cache.num_known(names)
        num_by_tier = self._land(asked, num_at_hand)
        num_found = num_at_hand + sum(num_by_tier.values())
        num_left = max(1, asked.num_tokens - num_found * BLOCK_TOKENS)
        self._compute(num_left, asked.begins_s)
        self._cache.use(names)
        self._write_down(names, num_at_hand, came_up=names[num_at_hand:num_found])
        return Served(
            num_at_hand=num_at_hand,
            num_by_tier=num_by_tier,
            num_computed_tokens=num_left,
            ttft_s=self._computed_by_s - asked.asked_s,
        )

    # ---- up

    def _fetch(self, chain: Sequence[bytes], now_s: float) -> tuple[Fetched | None, float]:
        """What comes up of these blocks, and how long the request waits."""
        if not chain:
            return None, 0.0
        tiers = self._stack.find(chain)
        self._tell_found(chain, tiers)
        plan = self._times.plan(runs_of(tiers), self.queued_tokens(now_s), now_s)
        if not plan.num_blocks:
            return None, 0.0
        fetched = self._stack.fetch(
            chain[: plan.num_blocks], [run.tier for run in plan.runs for _ in range(run.num_blocks)]
        )
        took_s = self._note_times(plan)
        return (fetched, took_s) if took_s <= plan.wait_s else (None, plan.wait_s)

    def _note_times(self, plan: FetchPlan) -> float:
        """How long all of it takes."""
        seconds = [self._tiers[run.tier].config.fetch_s(run.num_blocks) for run in plan.runs]
        if 0 < plan.wait_s < sum(seconds):
            self._times.fetched(plan.runs[-1].tier, plan.runs[-1].num_blocks, plan.wait_s)
        for run, took_s in zip(plan.runs, seconds, strict=True):
            self._times.fetched(run.tier, run.num_blocks, took_s)
        return sum(seconds)

    def _land(self, asked: Asked, num_at_hand: int) -> dict[str, int]:
        """Blocks that came up from each tier, of those that the cache still lacks and can go on with."""
        if asked.fetched is None or num_at_hand < asked.num_at_hand:
            return {}
        tiers = [run.tier for run in asked.fetched.runs for _ in range(run.num_blocks)][
            num_at_hand - asked.num_at_hand :
        ]
        if tiers:
            self._stack.promote(asked.fetched)
        return {tier: tiers.count(tier) for tier in dict.fromkeys(tiers)}

    def _compute(self, num_tokens: int, now_s: float) -> None:
        took_s = num_tokens / self._tokens_per_s
        self._computed_by_s = max(self._computed_by_s, now_s) + took_s
        self._times.computed(num_tokens, took_s)
        self.num_computed_tokens += num_tokens

    # ---- down

    def _write_down(self, names: Sequence[bytes], num_at_hand: int, came_up: Sequence[bytes]) -> None:
        """What the cache has learnt of the chain, but for what came up."""
        events = [
            PrefixEvent(index, 0, names[index], is_known=True, parent=names[index - 1] if index else None)
            for index in range(num_at_hand, len(names))
            if names[index] in self._cache.names
        ]
        self._queue.note(events, frozenset(came_up))
        while (piece := self._queue.take(PIECE_BLOCKS, now_s=0.0)) is not None:  # no tier fails: none comes again
            piece = piece.only(self._stack.lacking([piece.names[chain] for chain in piece.chains()]))
            rows = np.empty((len(piece.names), 0), np.uint8)
            kept = self._stack.keep(
                (piece.parents[chain.start], piece.names[chain], rows[chain]) for chain in piece.chains()
            )
            for tier, names_kept in kept.items():
                self._below[self._below_of(tier)].use(names_kept)

    # ---- told

    def _tell_found(self, chain: Sequence[bytes], tiers: Sequence[str | None]) -> None:
        gone = [name for name, tier in zip(chain, tiers, strict=True) if tier is None]
        for below in self._below.values():
            below.drop(gone)
        for tier in self._tiers:
            self._below[self._below_of(tier)].use(
                [name for name, each in zip(chain, tiers, strict=True) if each == tier]
            )

    def _below_of(self, tier: str) -> Below:
        return Below.SHARED if self._stack.is_shared(tier) else Below.OWN
