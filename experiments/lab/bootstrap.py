"""Intervals, of one side or a difference, by resampling what was measured: repeats, and in each requests. Pure numpy.

Where both sides had the same requests, a resample takes the same of them on both (paired). Gaps between tokens belong
to their request and are resampled with it: those of one request are not independent. Percentiles are the smallest
value that so large a share does not exceed, without interpolation.
Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapters 8 and 13: percentile intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """Values of one repeat and the request of each, numbered from 0; a request may have none, one or many."""

    values: np.ndarray  # [values] float64
    owners: np.ndarray  # [values] int64
    num_requests: int

    def sorted(self) -> "Samples":
        order = np.argsort(self.values, kind="stable")
        return Samples(self.values[order], self.owners[order], self.num_requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A figure of one side. Without bounds there was too little to resample."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """B's less A's. Without bounds there was too little to resample."""

    a: float
    b: float
    low: float | None
    high: float | None

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def percentile_intervals(
    repeats: Sequence[Samples], shares: Sequence[float], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> list[Interval]:
    """One for each of `shares` (0.9: p90), over all repeats together. ValueError where nothing was measured."""
    if not sum(len(one.values) for one in repeats):
        raise ValueError("nothing was measured")
    side, random = _Pooled(repeats), np.random.default_rng(seed)
    drawn = np.empty((num_resamples, len(shares)))
    for index in range(num_resamples):
        drawn[index] = side.percentiles(side.drawn(random, random.integers(len(repeats), size=len(repeats))), shares)
    drawn = drawn[~np.isnan(drawn).any(axis=1)]
    return [_interval(value, drawn[:, index]) for index, value in enumerate(side.percentiles(side.once(), shares))]


def mean_interval(values: Sequence[float], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Interval:
    """Of a figure that each repeat has one of; without bounds for a single one. ValueError for none."""
    if not values:
        raise ValueError("nothing was measured")
    found = np.asarray(values, float)
    picks = np.random.default_rng(seed).integers(len(found), size=(num_resamples, len(found)))
    return _interval(found.mean(), found[picks].mean(axis=1) if len(found) > 1 else np.empty(0))


def percentile_differences(
    a: Sequence[Samples],
    b: Sequence[Samples],
    shares: Sequence[float],
    *,
    is_paired: bool,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> list[Difference]:
    """One for each of `shares` (0.9: p90), over all repeats together; A's and B's repeats belong together in order.

    Raises:
        ValueError: repeats that do not match, pairs of unequal numbers of requests, or nothing measured on one side.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} repeats beside {len(b)}")
    if is_paired and any(x.num_requests != y.num_requests for x, y in zip(a, b, strict=True)):
        raise ValueError("pairs need the same requests on both sides")
    if not sum(len(one.values) for one in a) or not sum(len(one.values) for one in b):
        raise ValueError("nothing was measured")
    sides = [_Pooled(a), _Pooled(b)]
    estimates = [side.percentiles(side.once(), shares) for side in sides]
    random = np.random.default_rng(seed)
    drawn = np.empty((num_resamples, len(shares)))
    for index in range(num_resamples):
        repeats = random.integers(len(a), size=len(a))
        counts_a = sides[0].drawn(random, repeats)
        counts_b = counts_a if is_paired else sides[1].drawn(random, repeats)
        drawn[index] = sides[1].percentiles(counts_b, shares) - sides[0].percentiles(counts_a, shares)
    drawn = drawn[~np.isnan(drawn).any(axis=1)]  # a resample may hold no value at all
    return [_bounded(x, y, drawn[:, index]) for index, (x, y) in enumerate(zip(*estimates, strict=True))]


def mean_difference(
    a: Sequence[float], b: Sequence[float], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Difference:
    """Of a figure that each repeat has one of; resampled by pairs of repeats, and without bounds for a single one."""
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} repeats beside {len(b)}")
    before, after = np.asarray(a, float), np.asarray(b, float)
    if len(a) == 1:
        return Difference(a=before[0], b=after[0], low=None, high=None)
    picks = np.random.default_rng(seed).integers(len(a), size=(num_resamples, len(a)))
    return _bounded(before.mean(), after.mean(), (after - before)[picks].mean(axis=1))


class _Pooled:
    """One side's repeats in one sorted row of values, so that a resample is a weight for each."""

    def __init__(self, repeats: Sequence[Samples]) -> None:
        self._sizes = [one.num_requests for one in repeats]
        self._begins = np.concatenate([[0], np.cumsum(self._sizes)])
        values = np.concatenate([one.values for one in repeats])
        owners = np.concatenate([one.owners + begin for one, begin in zip(repeats, self._begins[:-1], strict=True)])
        whole = Samples(values, owners, int(self._begins[-1])).sorted()
        self._values, self._owners = whole.values, whole.owners

    def once(self) -> np.ndarray:
        """Each request as often as it was: [requests]."""
        return np.ones(self._begins[-1], np.int64)

    def drawn(self, random: np.random.Generator, repeats: np.ndarray) -> np.ndarray:
        """How often each request comes, with so many drawn from each of these repeats: [requests]."""
        counts = np.zeros(self._begins[-1], np.int64)
        for repeat in repeats:
            size = self._sizes[repeat]
            picks = random.integers(size, size=size) if size else np.zeros(0, np.int64)
            counts[self._begins[repeat] : self._begins[repeat + 1]] += np.bincount(picks, minlength=size)
        return counts

    def percentiles(self, counts: np.ndarray, shares: Sequence[float]) -> np.ndarray:
        """[shares]; not a number where no value is left."""
        weights = np.cumsum(counts[self._owners])
        if not len(weights) or not weights[-1]:
            return np.full(len(shares), np.nan)
        ranks = np.ceil(np.asarray(shares) * weights[-1] - 1e-9)
        return self._values[np.searchsorted(weights, np.maximum(ranks, 1))]


def _bounded(a: float, b: float, drawn: np.ndarray) -> Difference:
    low, high = _bounds(drawn)
    return Difference(a=float(a), b=float(b), low=low, high=high)


def _interval(value: float, drawn: np.ndarray) -> Interval:
    low, high = _bounds(drawn)
    return Interval(value=float(value), low=low, high=high)


def _bounds(drawn: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    if not len(drawn):
        return None, None
    rest = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [rest, 1 - rest])
    return float(low), float(high)
