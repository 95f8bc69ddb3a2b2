"""What changed from A to B at one point: latency percentiles and rates, each with its interval.

Only repeats that are done on both sides count, and of paired requests those that completed on both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.intervals import (
    PERCENTILES,
    Difference,
    Samples,
    mean_difference,
    percentile_differences,
)
from moonshard.experiments.common.slo import Slo
from moonshard.experiments.reading.summary import rates
from moonshard.experiments.reading.tables.frames import RunFrames, TrialFrames, gaps_ms
from moonshard.experiments.reading.tables.matching import Pair

IDENTITY = ("planned_prompt_tokens", "max_tokens", "session", "turn")  # what makes two requests the same

Values = Callable[[TrialFrames], pl.DataFrame]  # (request_index, value) rows of what completed


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One metric of one point. `is_better` is None where nothing clear can be said."""

    point: str
    metric: str
    found: Difference
    higher_is_better: bool

    @property
    def is_better(self) -> bool | None:
        return (self.found.difference > 0) == self.higher_is_better if self.found.is_clear else None


def shared_repeats(a: RunFrames, b: RunFrames, pair: Pair) -> list[int]:
    """The repeats that are finished in both runs."""
    return sorted({r for p, r in a.trials if p == pair.a.number} & {r for p, r in b.trials if p == pair.b.number})


def compare_point(a: RunFrames, b: RunFrames, pair: Pair, slo: Slo, *, seed: int = 0) -> list[Change]:
    """The changes at one point. ExperimentError where no repeat is finished on both sides, or pairs do not match."""
    shared = shared_repeats(a, b, pair)
    if not shared:
        raise ExperimentError(f"{pair.label}: no repeat is done in both runs")
    sides = [(a.trials[pair.a.number, repeat], b.trials[pair.b.number, repeat]) for repeat in shared]
    if pair.is_paired:
        for one, other in sides:
            _check_same(pair.label, one, other)
    return [*_latencies(pair, sides, seed), *_rates(pair, sides, slo)]


def _latencies(pair: Pair, sides: Sequence[tuple[TrialFrames, TrialFrames]], seed: int) -> list[Change]:
    metrics: dict[str, Values] = {
        "TTFT": lambda trial: _column(trial, "ttft_ms"),
        "ITL": lambda trial: gaps_ms(trial).rename({"gap_ms": "value"}),
        "TPOT": lambda trial: _column(trial, "tpot_ms"),
        "handoff gap": lambda trial: _column(trial, "handoff_gap_ms"),
        "E2E": lambda trial: _column(trial, "e2e_ms"),
    }
    found = []
    for name, values in metrics.items():
        samples = [_samples(one, other, values, pair.is_paired) for one, other in sides]
        a, b = [x for x, _ in samples], [y for _, y in samples]
        if not any(len(x.values) and len(y.values) for x, y in zip(a, b, strict=True)):
            continue  # no tokens were kept, or no KV moved on one side
        differences = percentile_differences(a, b, list(PERCENTILES.values()), is_paired=pair.is_paired, seed=seed)
        found += [
            Change(point=pair.label, metric=f"{name} {share}, ms", found=one, higher_is_better=False)
            for share, one in zip(PERCENTILES, differences, strict=True)
        ]
    return found


def _rates(pair: Pair, sides: Sequence[tuple[TrialFrames, TrialFrames]], slo: Slo) -> list[Change]:
    return [
        Change(
            point=pair.label,
            metric=name,
            found=mean_difference([of(one) for one, _ in sides], [of(other) for _, other in sides]),
            higher_is_better=True,
        )
        for name, of in rates(slo).items()
    ]


def _samples(one: TrialFrames, other: TrialFrames, values: Values, is_paired: bool) -> tuple[Samples, Samples]:
    chosen = [set(trial.completed["request_index"].to_list()) for trial in (one, other)]
    if is_paired:
        chosen = [chosen[0] & chosen[1]] * 2
    return _numbered(values(one), chosen[0]), _numbered(values(other), chosen[1])


def _numbered(values: pl.DataFrame, chosen: set[int]) -> Samples:
    """Requests numbered in order, so that the two of a pair have the same number."""
    own = values.filter(pl.col("request_index").is_in(sorted(chosen)))
    numbers = np.searchsorted(np.array(sorted(chosen), np.int64), own["request_index"].to_numpy())
    return Samples(own["value"].to_numpy(), numbers, len(chosen))


def _column(trial: TrialFrames, name: str) -> pl.DataFrame:
    return trial.completed.select("request_index", pl.col(name).alias("value")).drop_nulls()


def _check_same(point: str, one: TrialFrames, other: TrialFrames) -> None:
    ours, theirs = ({k: v for k, v in trial.record.workload.items() if k != "path"} for trial in (one, other))
    if ours != theirs:
        raise ExperimentError(f"{point}: its workload is {ours} in A and {theirs} in B")
    both = one.requests.join(other.requests, on="request_index", suffix="_b")
    for index, *identities in both.select("request_index", *IDENTITY, *(f"{name}_b" for name in IDENTITY)).iter_rows():
        ours, theirs = identities[: len(IDENTITY)], identities[len(IDENTITY) :]
        if ours != theirs:
            said = ", ".join(f"{n} {x} and {y}" for n, x, y in zip(IDENTITY, ours, theirs, strict=True) if x != y)
            raise ExperimentError(f"{point}: request {index} is not the same in A and B: {said}")
