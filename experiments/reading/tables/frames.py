"""What trials left, read back: records, and the client's rows as polars frames with the latencies in milliseconds."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import polars as pl

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.runner.asking import COMPLETED
from moonshard.experiments.runner.run_record import RunRecord, read_run
from moonshard.experiments.runner.schema import VERSION
from moonshard.experiments.runner.trial import TrialRecord
from moonshard.serving.observe.rows.schema import VERSION as TRACE_VERSION


@dataclass(frozen=True, eq=False, slots=True)
class TrialFrames:
    """The files of one finished trial. `tokens` is None where the run kept none."""

    record: TrialRecord
    requests: pl.DataFrame
    tokens: pl.DataFrame | None

    @property
    def completed(self) -> pl.DataFrame:
        return self.requests.filter(pl.col("outcome") == COMPLETED)


@dataclass(frozen=True, eq=False, slots=True)
class RunFrames:
    """A run with its finished trials, by point and repeat."""

    path: Path
    record: RunRecord
    trials: dict[tuple[int, int], TrialFrames]

    @property
    def whats_missing(self) -> str | None:
        """What is not finished, in words; None where every trial is."""
        num_trials, num_done = len(self.record.trials), len(self.trials)
        return None if num_done == num_trials else f"incomplete: {num_done} of {num_trials} trials are done"

    def of_point(self, number: int) -> list[TrialFrames]:
        """The point's trials in the order of repeats."""
        return [trial for (point, _), trial in sorted(self.trials.items()) if point == number]


def load_run(path: Path) -> RunFrames:
    """Reads a run. ExperimentError for a folder that has none, or one that cannot be read."""
    record = read_run(path)
    done = [trial for trial in record.trials if (path / trial.name).is_dir()]
    return RunFrames(path, record, {(trial.point, trial.repeat): load_trial(path / trial.name) for trial in done})


def load_trial(folder: Path) -> TrialFrames:
    """Reads a trial, adding `ttft_ms`, `tpot_ms`, `max_itl_ms`, `e2e_ms` and `late_ms` to the file's columns."""
    try:
        record = msgspec.json.decode((folder / "trial.json").read_bytes(), type=TrialRecord)
        requests = pl.read_parquet(folder / "requests.parquet")
        tokens = folder / "tokens.parquet"
        found = pl.read_parquet(tokens) if tokens.is_file() else None
        _check_versions(folder, record, *(table for table in (requests, found) if table is not None))
    except (OSError, msgspec.DecodeError, pl.exceptions.PolarsError) as error:
        raise ExperimentError(f"{folder}: {error}") from error
    gaps = pl.col("completion_tokens") - 1
    return TrialFrames(
        record,
        requests.with_columns(
            *((pl.col(f"{name}_ns") / 1e6).alias(f"{name}_ms") for name in ("ttft", "max_itl", "e2e", "late")),
            pl.when(gaps > 0).then(pl.col("decode_ns") / 1e6 / gaps).alias("tpot_ms"),
        ),
        found,
    )


def _check_versions(folder: Path, record: TrialRecord, *tables: pl.DataFrame) -> None:
    """A trial's folder may come from another run than its neighbours, by hand."""
    versions = sorted({TRACE_VERSION}.union(*(table["version"] for table in tables)))
    if record.schema_version != VERSION or versions != [TRACE_VERSION]:
        raise ExperimentError(
            f"{folder}: of schema version {record.schema_version} (tables' {', '.join(map(str, versions))}), "
            f"and this is version {VERSION} (tables' {TRACE_VERSION})"
        )


def gaps_ms(trial: TrialFrames) -> pl.DataFrame:
    """(request_index, gap_ms) of every gap between two tokens of a request that completed. No rows without tokens.

    Tokens of one message have no gap between them: a gateway that is behind sends several at once, and would else seem
    the faster for it. AIPerf and vLLM's benchmark count messages too.
    """
    if trial.tokens is None:
        return pl.DataFrame(schema={"request_index": pl.Int64, "gap_ms": pl.Float64})
    gap = pl.col("arrived_ns").diff().over("request_index") / 1e6
    whole = trial.tokens.join(trial.completed.select("request_index"), on="request_index", how="semi").sort(
        "request_index", "index"
    )
    return whole.select("request_index", gap.alias("gap_ms")).filter(pl.col("gap_ms") > 0)
