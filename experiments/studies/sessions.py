"""Sessions' turns as their clients saw them, and what all studies of sessions work out of these.

The oracle needs the prompts, which a run does not keep: the workload makes the same ones again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import polars as pl

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.tables.frames import TrialFrames
from moonshard.experiments.reading.tables.run_tables import PointOf, RunTables
from moonshard.experiments.workload.agents import oracle_cached_tokens
from moonshard.experiments.workload.options import plan, read_workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request as its client saw it."""

    session: int
    index: int
    sent_s: float
    prompt_tokens: int
    cached_tokens: int
    oracle_tokens: int = 0  # that one cache without bound would have had
    ttft_ms: float
    handoff_gap_ms: float | None = None  # from the first token to the second; None: there is no second


@dataclass(frozen=True, kw_only=True)
class TurnFigures:
    """Of all turns of an arm. Shares are of prompt tokens."""

    num_turns: int
    hit_rate: float
    oracle_hit_rate: float
    first_ttft_p50_ms: float  # of first turns
    later_ttft_p50_ms: float
    later_ttft_p90_ms: float

    @property
    def points_below_oracle(self) -> float:
        return 100 * (self.oracle_hit_rate - self.hit_rate)


def turn_figures(turns: Sequence[Turn]) -> TurnFigures:
    """StatisticsError where there are no first turns, or no later ones."""
    num_prompt = sum(turn.prompt_tokens for turn in turns)
    later = sorted(turn.ttft_ms for turn in turns if turn.index > 0)
    return TurnFigures(
        num_turns=len(turns),
        hit_rate=sum(turn.cached_tokens for turn in turns) / num_prompt,
        oracle_hit_rate=sum(turn.oracle_tokens for turn in turns) / num_prompt,
        first_ttft_p50_ms=median(turn.ttft_ms for turn in turns if turn.index == 0),
        later_ttft_p50_ms=median(later),
        later_ttft_p90_ms=later[len(later) * 9 // 10],
    )


def turns_of(point: PointOf, trial: TrialFrames) -> list[Turn]:
    """What a trial's clients saw, in the order of sending. ExperimentError for a workload that cannot be rebuilt."""
    rows = trial.completed.sort("sent_ns")
    oracle = oracle_cached_tokens(
        _prompts(trial, rows["request_index"].to_list()), whole_number(point, "server.kv.block_size")
    )
    return [_turn(row, tokens) for row, tokens in zip(rows.iter_rows(named=True), oracle, strict=True)]


def served_of(tables: RunTables, point: PointOf, trial: TrialFrames) -> pl.DataFrame:
    """The gateway's rows of a trial."""
    own = (pl.col("run") == point.run.path.name) & (pl.col("point") == point.record.number)
    return tables.server_requests.filter(own, pl.col("repeat") == trial.record.repeat)


def whole_number(point: PointOf, key: str) -> int:
    """A setting of a point. ExperimentError where it is none."""
    value = point.record.settings[key]
    if not isinstance(value, int):
        raise ExperimentError(f"{point.record.label}: {key} is {value!r}")
    return value


def _prompts(trial: TrialFrames, indices: Sequence[int]) -> list[list[int]]:
    faults: list[str] = []
    options = read_workload(trial.record.workload, faults)
    if options is None:
        raise ExperimentError(*faults)
    requests = plan(options, trial.record.model).requests
    return [requests[index].prompt.tokens() for index in indices]


def _turn(row: Mapping[str, Any], oracle_tokens: int) -> Turn:
    return Turn(
        session=int(row["session"].rpartition(" ")[2]),  # "session 7"
        index=row["turn"],
        sent_s=row["sent_ns"] / 1e9,
        prompt_tokens=row["prompt_tokens"],
        cached_tokens=row["cached_tokens"],
        oracle_tokens=oracle_tokens,
        ttft_ms=row["ttft_ms"],
        handoff_gap_ms=row["handoff_gap_ms"],
    )
