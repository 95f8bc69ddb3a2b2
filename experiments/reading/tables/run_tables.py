"""One run or many as polars frames for notebooks: what clients saw, and what servers recorded.

Each row says of which run, point and repeat it is, and has what its point sets, a column for each swept key. Warm-ups
are dropped. What is computed from the rows is in `reading.summary`, `interval_tables` and `pictures.plots`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.tables.frames import RunFrames, TrialFrames, gaps_ms, load_run
from moonshard.experiments.reading.tables.whole_tables import show_whole_tables
from moonshard.experiments.runner.run_record import PointRecord
from moonshard.experiments.runner.schema import CLIENT_TOKENS
from moonshard.serving.observe.rows.parts import PartsError, empty_table, read_table
from moonshard.serving.observe.rows.schema import REQUESTS, STEPS

type Metric = Literal["ttft", "itl", "max_itl", "tpot", "e2e", "handoff_gap"]


@dataclass(frozen=True, eq=False, slots=True)
class PointOf:
    """A point of a run, and its finished repeats."""

    run: RunFrames
    record: PointRecord
    trials: Sequence[TrialFrames]


@dataclass(frozen=True, eq=False, slots=True)
class RunTables:
    """The columns of `experiments/SCHEMA.md`, behind `run`, `point`, `label`, `repeat` and the keys in `swept`.

    Client requests have their latencies in milliseconds too. A frame of what was not recorded has no rows.
    """

    runs: Sequence[RunFrames]
    swept: tuple[str, ...]
    requests: pl.DataFrame
    tokens: pl.DataFrame
    server_requests: pl.DataFrame
    steps: pl.DataFrame

    def points(self) -> Iterator[PointOf]:
        """The points that have a finished repeat, run by run."""
        for run in self.runs:
            for point in run.record.points:
                if trials := run.of_point(point.number):
                    yield PointOf(run, point, trials)

    def tagged(self, frame: pl.DataFrame, point: PointOf) -> pl.DataFrame:
        """The frame with columns in front that say of which run and point its rows are."""
        return _tagged(frame, point, _dtypes(self.runs))

    def latencies(self, metric: Metric, where: pl.Expr | None = None) -> pl.DataFrame:
        """A row, with `repeat`, `request_index` and `ms`, for each request that completed; "itl": for each of its gaps.

        `where` chooses requests by their columns: `pl.col("max_tokens") > 64`.
        """
        found = [
            self.tagged(values_ms(trial, metric, where).with_columns(_repeat(trial)), point)
            for point in self.points()
            for trial in point.trials
        ]
        return pl.concat(found)


def load_runs(*paths: Path | str) -> RunTables:
    """Reads runs (results/NAME/STAMP), at least one. From here on polars shows tables whole: see `whole_tables`.

    ExperimentError for a folder that has no run, or none with a trial done.
    """
    show_whole_tables()
    runs = [load_run(Path(path)) for path in paths]
    for run in runs:
        if not run.trials:
            raise ExperimentError(f"{run.path}: no trial of it is done")
    dtypes = _dtypes(runs)
    parts: list[list[pl.DataFrame]] = [[], [], [], []]
    for run in runs:
        for (number, _), trial in sorted(run.trials.items()):
            point = PointOf(run, run.record.points[number], [trial])
            for part, frame in zip(parts, _frames(run, trial), strict=True):
                part.append(_tagged(frame.with_columns(_repeat(trial)), point, dtypes))
    return RunTables(runs, tuple(dtypes), *map(pl.concat, parts))


def values_ms(trial: TrialFrames, metric: Metric, where: pl.Expr | None = None) -> pl.DataFrame:
    """(request_index, ms) of what completed: a row for each request that has the metric, or each gap between tokens."""
    chosen = trial.completed if where is None else trial.completed.filter(where)
    if metric == "itl":
        return (
            gaps_ms(trial).join(chosen.select("request_index"), on="request_index", how="semi").rename({"gap_ms": "ms"})
        )
    return chosen.select("request_index", pl.col(f"{metric}_ms").alias("ms")).drop_nulls()


def _frames(run: RunFrames, trial: TrialFrames) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Client requests and tokens, server requests and steps."""
    recorded = run.path / trial.record.trial / "server"
    try:
        served, steps = read_table(recorded, REQUESTS), read_table(recorded, STEPS)
    except PartsError as error:
        raise ExperimentError(str(error)) from error
    tokens = empty_table(CLIENT_TOKENS) if trial.tokens is None else trial.tokens
    own = served.join(trial.requests.select("request_id"), on="request_id", how="semi")
    return trial.requests, tokens, own, _without_warmup(steps, trial.requests)


def _without_warmup(steps: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Steps without those launched before the first request was sent. Both stamps must be of one clock."""
    if requests.is_empty():
        return steps.clear()
    is_before = (pl.col("clock") == requests["clock"][0]) & (pl.col("launched_ns") < requests["sent_ns"].min())
    return steps.filter(~is_before)


def _repeat(trial: TrialFrames) -> pl.Expr:
    return pl.lit(trial.record.repeat, pl.Int64).alias("repeat")


def _tagged(frame: pl.DataFrame, point: PointOf, dtypes: dict[str, pl.DataType]) -> pl.DataFrame:
    swept = {key: _plain(point.record.swept.get(key), dtype) for key, dtype in dtypes.items()}
    own = [
        pl.lit(point.run.path.name, pl.String).alias("run"),
        pl.lit(point.record.number, pl.Int64).alias("point"),
        pl.lit(point.record.label, pl.String).alias("label"),
    ]
    keys = [pl.lit(value, dtypes[key]).alias(key) for key, value in swept.items()]
    return frame.select(*own, *keys, pl.all())


def _dtypes(runs: Sequence[RunFrames]) -> dict[str, pl.DataType]:
    """The dtype of each swept key over all points; what is neither a number nor a flag becomes text."""
    points = [point for run in runs for point in run.record.points]
    keys = dict.fromkeys(key for point in points for key in point.swept)
    return {key: _dtype([point.swept[key] for point in points if key in point.swept]) for key in keys}


def _dtype(values: Sequence[object]) -> pl.DataType:
    if all(isinstance(value, bool) for value in values):
        return pl.Boolean()
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return pl.String()
    return pl.Int64() if all(isinstance(value, int) for value in values) else pl.Float64()


def _plain(value: object, dtype: pl.DataType) -> object:
    return str(value) if value is not None and isinstance(dtype, pl.String) else value
