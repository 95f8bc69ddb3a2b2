"""Which blocks of a prompt come up from slower tiers, and how long its request may wait for them.

Of a prompt, the device has the first blocks; behind them, tiers have some more, in runs, the nearest tier that has a
block being the one to ask. Fetching up to some block and computing from there on takes a time that both parts' fitted
times give, and the least of these is chosen: fetching nothing is one of the choices. What is fetched is waited for only
as long as computing it would take, behind what is computed before it anyway: a tier that has become slow delays nobody
by more than it could have saved. A tier whose fetches are never worth it any more is asked now and then for a little,
without anybody waiting, since only so can it be seen that it has become faster.

Times are arguments. Source: that loading and computing are compared per request, CacheGen (arXiv:2310.07240) and Cake
(arXiv:2410.03065, which computes from the front while it loads from the end; here what is fetched is a beginning).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonshard.serving.control.line import Line

MEMORY = 0.95  # what an observation weighs when the next one comes
UNKNOWN_WAIT_S = 2.0  # for a fetch of which nothing is known, or in place of computing of which nothing is
LEAST_WAIT_S = 0.005  # below which times are mostly those of threads and event loops
PROBE_EVERY_S = 10.0  # how long a tier that is not worth it is left alone
PROBE_BLOCKS = 4
UNKNOWN_SHARE = 0.5
SHARE_BLOCKS = 16  # of which it is said what fetching takes beside computing


class Run(NamedTuple):
    """So many blocks behind one another that one tier is to give."""

    tier: str
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchPlan:
    """What is fetched: the first blocks behind those that the device has. `wait_s` is 0 where nobody waits for it."""

    runs: tuple[Run, ...]
    wait_s: float

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.runs)


NOTHING = FetchPlan(runs=(), wait_s=0.0)


@dataclass(slots=True)
class _TierTimes:
    fetch: Line = field(default_factory=lambda: Line(MEMORY))  # seconds by blocks
    asked_s: float | None = None  # when it was last asked for anything
    is_probed: bool = False  # what comes next counts alone: what was before is what is doubted


class FetchTimes:
    """What was seen of one worker's tiers and of its own computing, and what follows for a prompt."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._tiers: dict[str, _TierTimes] = {}
        self._compute = Line(MEMORY)  # seconds by tokens
        self._land = Line(MEMORY)  # seconds by blocks

    def __repr__(self) -> str:
        tiers = ", ".join(f"{name}: {tier.fetch}" for name, tier in self._tiers.items())
        return f"FetchTimes(compute: {self._compute}, land: {self._land}, {tiers})"

    # ---- what was seen

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prefill step computed so many tokens."""
        self._compute.observe(num_tokens, seconds)

    def fetched(self, tier: str, num_blocks: int, seconds: float) -> None:
        """So many blocks came from that tier, in so long, or were waited for in vain that long."""
        known = self._of(tier)
        if known.is_probed:
            known.fetch, known.is_probed = Line(MEMORY), False
        known.fetch.observe(num_blocks, seconds)

    def landed(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were written into the device's pages."""
        self._land.observe(num_blocks, seconds)

    # ---- what follows

    def fetch_s(self, tier: str, num_blocks: int) -> float | None:
        """How long so many blocks of that tier take until they are in the device's pages; None: not known."""
        fetch = self._of(tier).fetch
        return fetch.at(num_blocks) + self._land.at(num_blocks) if fetch.weight else None

    def share(self, tier: str) -> float:
        """How long blocks of that tier take to fetch, beside computing them: at most 1."""
        fetch_s, compute_s = self.fetch_s(tier, SHARE_BLOCKS), self.compute_s(SHARE_BLOCKS * self._block_size)
        if fetch_s is None or not compute_s:
            return UNKNOWN_SHARE
        return min(1.0, fetch_s / compute_s)

    def compute_s(self, num_tokens: int) -> float | None:
        """How long computing so many tokens takes; None: not known."""
        return self._compute.at(num_tokens) if self._compute.weight else None

    def plan(self, runs: Sequence[Run], num_tokens_ahead: int, now_s: float) -> FetchPlan:
        """What to fetch, of what tiers have behind what the device has; `num_tokens_ahead` are computed before."""
        runs = _joined(runs)
        if not runs:
            return NOTHING
        num_best = self._num_best(runs)
        if not num_best:
            return self._probe(runs[0], now_s)
        chosen = _first(runs, num_best)
        for run in chosen:
            self._of(run.tier).asked_s = now_s
        return FetchPlan(runs=chosen, wait_s=self._wait_s(chosen, num_tokens_ahead))

    def _num_best(self, runs: Sequence[Run]) -> int:
        """After how many blocks it is best to go on by computing. Times are linear within a run, so the best is at the
        end of one.
        """
        saved_s, best_s, num_blocks, num_best = 0.0, 0.0, 0, 0
        for run in runs:
            num_blocks += run.num_blocks
            fetch_s = self.fetch_s(run.tier, run.num_blocks)
            compute_s = self.compute_s(run.num_blocks * self._block_size)
            if fetch_s is None or compute_s is None:
                return num_blocks  # it is tried, and then known
            saved_s += compute_s - fetch_s
            if saved_s > best_s:
                best_s, num_best = saved_s, num_blocks
        return num_best

    def _wait_s(self, runs: Sequence[Run], num_tokens_ahead: int) -> float:
        num_tokens = sum(run.num_blocks for run in runs) * self._block_size
        compute_s = self.compute_s(num_tokens + num_tokens_ahead)
        return UNKNOWN_WAIT_S if compute_s is None else max(LEAST_WAIT_S, compute_s)

    def _probe(self, run: Run, now_s: float) -> FetchPlan:
        tier = self._of(run.tier)
        if tier.asked_s is not None and now_s - tier.asked_s < PROBE_EVERY_S:
            return NOTHING
        tier.asked_s, tier.is_probed = now_s, True
        return FetchPlan(runs=(Run(run.tier, min(run.num_blocks, PROBE_BLOCKS)),), wait_s=0.0)

    def _of(self, tier: str) -> _TierTimes:
        return self._tiers.setdefault(tier, _TierTimes())


def runs_of(tiers: Sequence[str | None]) -> tuple[Run, ...]:
    """The runs of a chain whose blocks are to come from these tiers, up to the first that none has."""
    found = list[Run]()
    for tier in tiers:
        if tier is None:
            break
        found.append(Run(tier, 1))
    return _joined(found)


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    joined = list[Run]()
    for run in runs:
        if joined and joined[-1].tier == run.tier:
            joined[-1] = Run(run.tier, joined[-1].num_blocks + run.num_blocks)
        elif run.num_blocks:
            joined.append(run)
    return tuple(joined)


def _first(runs: Sequence[Run], num_blocks: int) -> tuple[Run, ...]:
    """The runs of the first so many blocks."""
    found = list[Run]()
    for run in runs:
        num_taken = min(run.num_blocks, num_blocks)
        if num_taken:
            found.append(Run(run.tier, num_taken))
        num_blocks -= num_taken
    return tuple(found)
