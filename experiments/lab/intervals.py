"""Tables of figures by point, each with its interval: percentiles of latencies, and rates."""

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from moonshard.experiments.lab.bootstrap import Interval, Samples, mean_interval, percentile_intervals
from moonshard.experiments.lab.figures import rates
from moonshard.experiments.lab.frames import TrialFrames
from moonshard.experiments.lab.report import slo_of
from moonshard.experiments.lab.run_tables import Metric, PointOf, RunTables, values_ms

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentile_table(
    tables: RunTables,
    metric: Metric,
    shares: Mapping[str, float] = PERCENTILES,
    *,
    where: pl.Expr | None = None,
    seed: int = 0,
) -> pl.DataFrame:
    """A row for each point and share, in ms, with the bounds of the 95% interval; points without the metric have none.

    Of several repeats the mean of their percentiles, and Student's t interval; of a single one an interval by blocks of
    its requests, which does not say what another repeat would give.

    `where` chooses requests, as in `RunTables.latencies`. `num_requests` are those that completed.
    """
    found = [_percentiles(tables, point, metric, shares, where, seed) for point in tables.points()]
    return pl.concat(found)


def rate_table(tables: RunTables) -> pl.DataFrame:
    """A row for each point and rate: requests, tokens and good requests a second, and the share within the SLO.

    Means of repeats, with Student's t interval: one repeat alone has no bounds.
    """
    found = []
    for point in tables.points():
        by_name = rates(slo_of(point.run))
        intervals = [mean_interval([of(trial) for trial in point.trials]) for of in by_name.values()]
        frame = pl.DataFrame({"rate": list(by_name), **_columns("value", intervals)}, schema_overrides=_dtypes("value"))
        found.append(tables.tagged(frame, point))
    return pl.concat(found)


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
    """Requests are numbered by the order of their places."""
    chosen = trial.completed if where is None else trial.completed.filter(where)
    values = values_ms(trial, metric, where)
    owners = np.searchsorted(chosen["place"].sort().to_numpy(), values["place"].to_numpy())
    return Samples(values["ms"].to_numpy(), owners, chosen.height)


def _columns(name: str, intervals: Sequence[Interval]) -> dict[str, Sequence[float | None]]:
    return {
        name: [one.value for one in intervals],
        "low": [one.low for one in intervals],
        "high": [one.high for one in intervals],
        "num_repeats": [one.num_repeats for one in intervals],
    }


def _dtypes(name: str) -> dict[str, pl.DataType]:
    return {name: pl.Float64(), "low": pl.Float64(), "high": pl.Float64(), "num_repeats": pl.Int64()}
