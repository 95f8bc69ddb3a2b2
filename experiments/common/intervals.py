"""95% intervals of one side or of a difference, over repeats or inside a single one. Pure numpy.

With several repeats each has one figure (a percentile, a rate), and the interval is Student's t on these, or on their
differences: it covers all that changes from one repeat to the next. Of latencies it is taken on their logarithms, since
they vary by factors: so no bound lies below 0. A single repeat knows nothing of other repeats. Its
percentiles are resampled by blocks of consecutive requests, since neighbours wait in the same queue; that interval
covers which requests happened to meet, and is no ground for a verdict. Gaps between tokens belong to their request and
are drawn with it. Where both sides had the same requests (paired), a resample takes the same blocks of both.
Percentiles are the smallest value that so large a share does not exceed, without interpolation.
Sources: Student, "The probable error of a mean" (Biometrika 1908); Künsch, "The jackknife and the bootstrap for general
stationary observations" (Annals of Statistics 1989): moving blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf, log, sqrt

import numpy as np

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
CONFIDENCE = 0.95
NUM_RESAMPLES = 1000
MIN_REPEATS = 3  # for a verdict
# The 97.5% quantile of Student's t with 1 to 10 degrees of freedom.
STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
NORMAL = 1.959964


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """The values of one repeat, and of each its request (numbered from 0), which may have none, one or many."""

    values: np.ndarray  # [values] float64
    owners: np.ndarray  # [values] int64
    num_requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A figure of one side: the mean of its repeats (of latencies the geometric one). No bounds: too little data."""

    value: float
    low: float | None
    high: float | None
    num_repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """B's figure less A's, each the mean of its repeats. No bounds: too little data."""

    a: float
    b: float
    low: float | None
    high: float | None
    num_repeats: int

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def is_clear(self) -> bool:
        """Whether there are enough repeats for a verdict, and their interval does not contain 0."""
        if self.num_repeats < MIN_REPEATS or self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


def percentile_intervals(
    repeats: Sequence[Samples], shares: Sequence[float], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> list[Interval]:
    """One interval for each of `shares` (0.9: p90); over several repeats, their `latency_interval`.

    Repeats without a value are left out; ValueError where none is left.
    """
    measured = [one for one in repeats if len(one.values)]
    if not measured:
        raise ValueError("nothing was measured")
    found = np.array([_Weighted(one).once(shares) for one in measured])  # [repeats, shares]
    if len(measured) > 1:
        return [latency_interval(column) for column in found.T.tolist()]
    (one,) = measured
    side = _Weighted(one)
    drawn = _drawn([side.percentiles(counts, shares) for counts in _resamples(one.num_requests, seed, num_resamples)])
    return [
        Interval(value=value, low=low, high=high, num_repeats=1)
        for value, (low, high) in zip(found[0].tolist(), drawn, strict=True)
    ]


def mean_interval(values: Sequence[float]) -> Interval:
    """Of a figure with one value per repeat; no bounds for a single repeat. ValueError for none."""
    if not len(values):
        raise ValueError("nothing was measured")
    low, high = _student(np.asarray(values, float))
    return Interval(value=float(np.mean(values)), low=low, high=high, num_repeats=len(values))


def rate_interval(values: Sequence[float], highest: float = inf) -> Interval:
    """Of a rate or share with one value per repeat: `mean_interval`, cut to what is possible, 0 to `highest`."""
    found = mean_interval(values)
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(found.low, 0.0), high=min(found.high, highest))


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Of a ratio with one value per repeat: their geometric mean, and Student's t on their logarithms.

    So "twice" and "half" are equally far from "as much", and no bound lies below 0. ValueError for none, or one that is
    not above 0.
    """
    if min(ratios, default=1.0) <= 0:
        raise ValueError("a ratio that is not above 0 has no logarithm")
    logs = mean_interval([log(ratio) for ratio in ratios])
    low, high = (None if bound is None else exp(bound) for bound in (logs.low, logs.high))
    return Interval(value=exp(logs.value), low=low, high=high, num_repeats=logs.num_repeats)


def latency_interval(values: Sequence[float]) -> Interval:
    """Of a latency with one value per repeat: as for a ratio, or where one is not above 0, as for any figure."""
    return ratio_interval(values) if min(values, default=0.0) > 0 else mean_interval(values)


def percentile_differences(
    a: Sequence[Samples],
    b: Sequence[Samples],
    shares: Sequence[float],
    *,
    is_paired: bool,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> list[Difference]:
    """One difference for each of `shares` (0.9: p90). A's and B's repeats belong together in order.

    Repeats without a value on one side are left out.

    Raises:
        ValueError: repeats that do not match, pairs of unequal numbers of requests, or nothing measured on one side.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} repeats beside {len(b)}")
    if is_paired and any(x.num_requests != y.num_requests for x, y in zip(a, b, strict=True)):
        raise ValueError("pairs need the same requests on both sides")
    measured = [(x, y) for x, y in zip(a, b, strict=True) if len(x.values) and len(y.values)]
    if not measured:
        raise ValueError("nothing was measured")
    sides = [(_Weighted(x), _Weighted(y)) for x, y in measured]
    before, after = (np.array([pair[side].once(shares) for pair in sides]) for side in (0, 1))  # [repeats, shares]
    if len(measured) > 1:
        return [mean_difference(x, y) for x, y in zip(before.T.tolist(), after.T.tolist(), strict=True)]
    (x, y), (of_x, of_y) = measured[0], sides[0]
    counts_x = _resamples(x.num_requests, seed, num_resamples)
    counts_y = counts_x if is_paired else _resamples(y.num_requests, seed + 1, num_resamples)
    drawn = _drawn(
        [
            of_y.percentiles(theirs, shares) - of_x.percentiles(ours, shares)
            for ours, theirs in zip(counts_x, counts_y, strict=True)
        ]
    )
    return [
        Difference(a=one, b=other, low=low, high=high, num_repeats=1)
        for one, other, (low, high) in zip(before[0].tolist(), after[0].tolist(), drawn, strict=True)
    ]


def mean_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Of a figure with one value per repeat, by pairs of repeats; no bounds for a single pair."""
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} repeats beside {len(b)}")
    before, after = np.asarray(a, float), np.asarray(b, float)
    low, high = _student(after - before)
    return Difference(a=float(before.mean()), b=float(after.mean()), low=low, high=high, num_repeats=len(a))


def student_t(num_freedoms: int) -> float:
    """The 97.5% quantile; beyond the table by Fisher's expansion, which is right to three digits there."""
    if num_freedoms <= len(STUDENT_T):
        return STUDENT_T[num_freedoms - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * num_freedoms) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * num_freedoms**2)


def _student(values: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """The 95% interval of the mean; no bounds for fewer than two values."""
    if len(values) < 2:
        return None, None
    half = student_t(len(values) - 1) * float(values.std(ddof=1)) / sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


class _Weighted:
    """One repeat's values in a sorted row, so that a resample is a weight for each."""

    def __init__(self, repeat: Samples) -> None:
        order = np.argsort(repeat.values, kind="stable")
        self._values, self._owners, self._num_requests = repeat.values[order], repeat.owners[order], repeat.num_requests

    def once(self, shares: Sequence[float]) -> np.ndarray:
        """The percentiles [shares] with each request counted once."""
        return self.percentiles(np.ones(self._num_requests, np.int64), shares)

    def percentiles(self, counts: np.ndarray, shares: Sequence[float]) -> np.ndarray:
        """The percentiles [shares] with each request counted so often [requests]; NaN where no value is left."""
        weights = np.cumsum(counts[self._owners])
        if not len(weights) or not weights[-1]:
            return np.full(len(shares), np.nan)
        ranks = np.ceil(np.asarray(shares) * weights[-1] - 1e-9)
        return self._values[np.searchsorted(weights, np.maximum(ranks, 1))]


def block_length(num_requests: int) -> int:
    """How many consecutive requests make a block: about as many as there are blocks."""
    return ceil(sqrt(num_requests))


def _resamples(num_requests: int, seed: int, num_resamples: int) -> list[np.ndarray]:
    """How often each request is drawn, [requests] per resample. Blocks begin anywhere; the last may be cut."""
    random, length = np.random.default_rng(seed), block_length(num_requests)
    found = []
    for _ in range(num_resamples):
        begins = random.integers(num_requests - length + 1, size=ceil(num_requests / length))
        picks = (begins[:, None] + np.arange(length)).ravel()[:num_requests]
        found.append(np.bincount(picks, minlength=num_requests))
    return found


def _drawn(resampled: Sequence[np.ndarray]) -> Sequence[tuple[float, float] | tuple[None, None]]:
    """The bounds for each share over the resamples, of which some may hold no value at all."""
    drawn = np.array(resampled)
    drawn = drawn[~np.isnan(drawn).any(axis=1)]
    if not len(drawn):
        return [(None, None)] * len(resampled[0])
    rest = (1 - CONFIDENCE) / 2
    return [(float(low), float(high)) for low, high in np.quantile(drawn, [rest, 1 - rest], axis=0).T]
