"""The best arm at each load: the one that did most, and of those that repeats do not tell from it the steadiest. Pure.

Which of two arms did more by chance is no finding: arms tie whose repeats, in pairs, differ from the highest one by an
interval that has 0 in it. Among these the p90 of gaps between tokens decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

import polars as pl

from moonshard.experiments.common.intervals import mean_difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    name: str
    values: Mapping[int, float]  # by repeat: more is better
    gap_ms: float = inf  # p90; without gaps there is none

    @property
    def mean(self) -> float:
        return fmean(self.values.values())


def best_arm(arms: Sequence[Arm]) -> tuple[Arm, list[Arm]]:
    """The best arm, and those tied with it. ValueError for no arms."""
    highest = max(arms, key=lambda arm: arm.mean)
    tied = [arm for arm in arms if not _is_less(arm, highest)]
    best = min(tied, key=lambda arm: arm.gap_ms)
    return best, [arm for arm in tied if arm is not best]


def best_table(rates: pl.DataFrame, gaps: pl.DataFrame, by: Sequence[str], arm: str = "arm") -> pl.DataFrame:
    """A row for each load, which the columns `by` tell: its best arm with its figures, and what is tied with it.

    Args:
        rates: a row for each trial, as `trial_rates` has them.
        gaps: the rows of `percentile_table(tables, "itl")`.
        arm: the column that tells one arm from another.
    """
    p90 = gaps.filter(percentile="p90")
    rows = [
        _row(dict(zip(by, key, strict=True)), own, p90, arm) for key, own in rates.group_by(*by, maintain_order=True)
    ]
    return pl.DataFrame(rows, schema_overrides={"tied with": pl.String()}, infer_schema_length=None)


def _row(load: Mapping[str, object], rates: pl.DataFrame, p90: pl.DataFrame, arm: str) -> dict[str, object]:
    gaps_ms = dict(
        p90.filter(*(pl.col(key).eq_missing(value) for key, value in load.items())).select(arm, "ms").iter_rows()
    )
    arms = [
        Arm(name=str(name), values=dict(own.select("repeat", "value").iter_rows()), gap_ms=gaps_ms.get(name, inf))
        for (name,), own in rates.group_by(arm, maintain_order=True)
    ]
    best, tied = best_arm(arms)
    return {
        **load,
        "best": best.name,
        rates["rate"][0]: best.mean,
        "ITL p90, ms": None if best.gap_ms == inf else best.gap_ms,
        "tied with": "; ".join(other.name for other in tied) or None,
    }


def _is_less(arm: Arm, highest: Arm) -> bool:
    """Whether repeats show that `arm` is less; with a single repeat the two figures decide."""
    shared = sorted(arm.values.keys() & highest.values.keys())
    if not shared:
        return arm.mean < highest.mean
    found = mean_difference([arm.values[repeat] for repeat in shared], [highest.values[repeat] for repeat in shared])
    return found.difference > 0 if found.low is None else found.low > 0
