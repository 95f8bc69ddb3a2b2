"""Tables of figures by point, each with its interval: percentiles of latencies, and rates."""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import numpy as np
import polars as pl

from moonshard.experiments.common.intervals import (
    PERCENTILES,
    Interval,
    Samples,
    mean_interval,
    percentile_intervals,
    rate_interval,
)
from moonshard.experiments.reading.report import slo_of
from moonshard.experiments.reading.summary import Rate, rates
from moonshard.experiments.reading.tables.frames import TrialFrames
from moonshard.experiments.reading.tables.run_tables import Metric, PointOf, RunTables, values_ms


def percentile_table(
    tables: RunTables,
    metric: Metric,
    shares: Mapping[str, float] = PERCENTILES,
    *,
    where: pl.Expr | None = None,
    seed: int = 0,
) -> pl.DataFrame:
    """A row for each point and share, in ms, with the bounds of the 95% interval; points without the metric have none.

    Of several repeats the geometric mean of their percentiles, and Student's t interval of the logarithms; of a single
    one an interval by blocks of its requests, which does not say what another repeat would give.

    `where` chooses requests, as in `RunTables.latencies`. `num_requests` are those that completed.
    """
    found = [_percentiles(tables, point, metric, shares, where, seed) for point in tables.points()]
    return pl.concat(found)


def rate_table(tables: RunTables, rate: Rate) -> pl.DataFrame:
    """A row for each point: the mean of its repeats as `value`, and their `rate_interval`; one repeat has no bounds."""
    highest = 1.0 if rate == "SLO attainment" else inf
    found = []
    for point in tables.points():
        of = rates(slo_of(point.run))[rate]
        interval = rate_interval([of(trial) for trial in point.trials], highest)
        columns = {"rate": [rate], **_columns("value", [interval])}
        found.append(tables.tagged(pl.DataFrame(columns, schema_overrides=_dtypes("value")), point))
    return pl.concat(found)


def trial_rates(tables: RunTables, rate: Rate) -> pl.DataFrame:
    """A row for each trial, with its `repeat` and `value`; `rate_table` has the mean over repeats."""
    found = []
    for point in tables.points():
        of = rates(slo_of(point.run))[rate]
        rows = [(rate, trial.record.repeat, of(trial)) for trial in point.trials]
        schema = {"rate": pl.String(), "repeat": pl.Int64(), "value": pl.Float64()}
        found.append(tables.tagged(pl.DataFrame(rows, schema=schema, orient="row"), point))
    return pl.concat(found)


def offered_table(tables: RunTables) -> pl.DataFrame:
    """A row for each open loop with the requests that it offered a second, the mean of its repeats."""
    found = []
    for point in tables.points():
        offered = [t.record.offered_per_s for t in point.trials if t.record.offered_per_s is not None]
        if offered:
            found.append(tables.tagged(pl.DataFrame({"offered_per_s": [float(np.mean(offered))]}), point))
    return pl.concat(found) if found else pl.DataFrame(schema={"point": pl.Int64(), "offered_per_s": pl.Float64()})


def median_table(
    frame: pl.DataFrame,
    by: Sequence[str],
    column: str,
    interval: Callable[[Sequence[float]], Interval] = mean_interval,
) -> pl.DataFrame:
    """Of any column of a run's frames: for each group, the `interval` over its repeats' medians."""
    medians = frame.drop_nulls(column).group_by(*by, "repeat", maintain_order=True).agg(pl.col(column).median())
    rows = []
    for key, own in medians.group_by(*by, maintain_order=True):
        found = interval(own[column].to_list())
        rows.append((*key, found.value, found.low, found.high, found.num_repeats))
    keys = {name: frame.schema[name] for name in by}
    return pl.DataFrame(rows, schema={**keys, column: pl.Float64(), **_bounds()}, orient="row")


def _percentiles(
    tables: RunTables, point: PointOf, metric: Metric, shares: Mapping[str, float], where: pl.Expr | None, seed: int
) -> pl.DataFrame:
    repeats = [_samples(trial, metric, where) for trial in point.trials]
    num_requests = sum(one.num_requests for one in repeats)
    intervals: list[Interval] = []
    if any(len(one.values) for one in repeats):
        intervals = percentile_intervals(repeats, list(shares.values()), seed=seed)
    names = list(shares) if intervals else []
    columns = {"percentile": names, **_columns("ms", intervals)}
    frame = pl.DataFrame(columns, schema_overrides={"percentile": pl.String(), **_dtypes("ms")})
    return tables.tagged(frame.with_columns(pl.lit(num_requests).alias("num_requests")), point)


def _samples(trial: TrialFrames, metric: Metric, where: pl.Expr | None) -> Samples:
    """The samples of each repeat; requests are numbered in order."""
    chosen = trial.completed if where is None else trial.completed.filter(where)
    values = values_ms(trial, metric, where)
    owners = np.searchsorted(chosen["request_index"].sort().to_numpy(), values["request_index"].to_numpy())
    return Samples(values["ms"].to_numpy(), owners, chosen.height)


def _columns(name: str, intervals: Sequence[Interval]) -> dict[str, Sequence[float | None]]:
    return {
        name: [one.value for one in intervals],
        "low": [one.low for one in intervals],
        "high": [one.high for one in intervals],
        "num_repeats": [one.num_repeats for one in intervals],
    }


def _dtypes(name: str) -> dict[str, pl.DataType]:
    return {name: pl.Float64(), **_bounds()}


def _bounds() -> dict[str, pl.DataType]:
    return {"low": pl.Float64(), "high": pl.Float64(), "num_repeats": pl.Int64()}
