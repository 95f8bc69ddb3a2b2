"""The study's bar: where the aggregated baseline has lost its SLO, ITL is lower with prefill and decode apart. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from moonshard.experiments.common.intervals import Interval
from moonshard.experiments.reading.pictures.bars import judged, told

MIN_TIMES_BETTER = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One rate, and the baseline's best arm at it."""

    rate_per_s: float
    baseline: str
    attained: float  # the share of the baseline's requests that kept to the SLO
    times_better: Interval  # the baseline's p90 ITL by that of the disaggregated arm


def verdict(loads: Sequence[Load], attainment: float) -> str:
    """The verdict at the lowest load where the baseline loses its SLO; where it never does, that is the answer."""
    lost = [load for load in loads if load.attained < attainment]
    if not lost:
        highest = max(loads, key=lambda load: load.rate_per_s)
        return (
            f"The bar is not judged: the baseline keeps its SLO at every rate that was offered. At the highest, "
            f"{highest.rate_per_s:g} requests/s, {highest.attained:.1%} of its requests do, and its p90 ITL is "
            f"{told(highest.times_better)} times that of the disaggregated arm."
        )
    first = min(lost, key=lambda load: load.rate_per_s)
    found = judged(first.times_better, at_least=MIN_TIMES_BETTER)
    return (
        f"The baseline loses its SLO at {first.rate_per_s:g} requests/s: {first.attained:.1%} of the requests of its "
        f"best arm ({first.baseline}) keep to it. Its p90 ITL is {told(first.times_better)} times that "
        f"of the disaggregated arm. The bar of {MIN_TIMES_BETTER:g}: {found}."
    )
