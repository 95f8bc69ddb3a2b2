"""The study's bar: good requests a second at three times the capacity, by those at the load where they peak. Pure."""

from collections.abc import Mapping, Sequence

import polars as pl

from moonshard.experiments.common.intervals import Interval, mean_interval
from moonshard.experiments.reading.pictures.bars import judged, told

MIN_SHARE = 0.9
AT_LOAD = 3.0  # times the capacity


def share_of_peak(rates: Mapping[float, Sequence[float]]) -> tuple[float, Interval]:
    """The load with the highest mean rate, and for each repeat the highest load's share of it.

    `rates` are good requests a second by load, each with the same repeats in the same order. ValueError for none.
    """
    peak = max(rates, key=lambda load: sum(rates[load]))
    pairs = zip(rates[max(rates)], rates[peak], strict=True)
    return peak, mean_interval([highest / at_peak if at_peak else 0.0 for highest, at_peak in pairs])


def verdict(arm: str, good: pl.DataFrame, load: str) -> str:
    """The verdict on one arm. The rows of `good` are trials: `repeat`, `value`, and the load in the named column.

    Repeats that lack a load, as the last one of a run that was broken off, are left out.
    """
    whole = good.filter(pl.len().over("repeat") == good[load].n_unique()).sort(load, "repeat")
    if whole.is_empty():
        return f"{arm}: no repeat has all of the loads."
    rates: dict[float, list[float]] = dict(whole.group_by(load, maintain_order=True).agg("value").iter_rows())
    peak, share = share_of_peak(rates)
    where = "it is the peak itself" if peak == max(rates) else f"{told(share)} of the peak, which is at {peak:g} times"
    found = f"{arm}: at {max(rates):g} times the capacity {where}."
    if max(rates) < AT_LOAD:
        return f"{found} The bar is for {AT_LOAD:g} times, and is not judged."
    return f"{found} The bar of {MIN_SHARE:g}: {judged(share, at_least=MIN_SHARE)}."
