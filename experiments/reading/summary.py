"""What the trials of a point come to: latencies, rates, goodput, what was clipped, and what the load generator took."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from moonshard.experiments.common.flat import Flat
from moonshard.experiments.common.intervals import PERCENTILES
from moonshard.experiments.common.slo import Slo
from moonshard.experiments.reading.tables.frames import RunFrames, TrialFrames, gaps_ms
from moonshard.experiments.reading.tables.goodput import Latency, Offered, attained, goodput, meets
from moonshard.experiments.runner.sweep import label
from moonshard.experiments.workload.options import RATE_KEYS


@dataclass(frozen=True, kw_only=True, slots=True)
class PointSummary:
    """Figures over all finished repeats: p50, p90 and p99 of completed requests, none where nothing completed.

    Of several repeats they are the mean of each one's, as everywhere: see `intervals`.
    """

    number: int
    label: str
    num_repeats: int
    num_requests: int
    num_failed: int
    num_late: int
    num_clipped: int  # prompts and answers that were cut to the context
    offered_per_s: float | None  # None: a closed loop
    completed_per_s: float
    output_tokens_per_s: float
    cached_share: float  # of the prompts of what completed
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    e2e_ms: tuple[float, ...]
    handoff_gap_ms: tuple[float, ...]
    attained: float  # share of all requests that met all objectives
    good_per_s: float  # requests a second that did
    client_cores: float  # processor time of the load generator by wall time: 1 is one core


def point_summary(run: RunFrames, number: int, slo: Slo) -> PointSummary | None:
    """The summary of a point; None where none of its repeats is finished."""
    trials = run.of_point(number)
    if not trials:
        return None
    records = [trial.record for trial in trials]
    completed = [trial.completed for trial in trials]
    latencies = [latency for trial in trials for latency in latencies_of(trial)]
    wall_s = sum(record.wall_s for record in records)
    offered = [record.offered_per_s for record in records if record.offered_per_s is not None]
    return PointSummary(
        number=number,
        label=run.record.points[number].label,
        num_repeats=len(trials),
        num_requests=sum(record.num_sent for record in records),
        num_failed=sum(record.num_failed for record in records),
        num_late=sum(record.num_late for record in records),
        num_clipped=sum(record.num_clipped for record in records),
        offered_per_s=float(np.mean(offered)) if offered else None,
        completed_per_s=sum(frame.height for frame in completed) / wall_s,
        output_tokens_per_s=_total(completed, "completion_tokens") / wall_s,
        cached_share=_total(completed, "cached_tokens") / max(1.0, _total(completed, "prompt_tokens")),
        ttft_ms=_percentiles([frame["ttft_ms"].drop_nulls().to_numpy() for frame in completed]),
        itl_ms=_percentiles([gaps_ms(trial)["gap_ms"].to_numpy() for trial in trials]),
        tpot_ms=_percentiles([frame["tpot_ms"].drop_nulls().to_numpy() for frame in completed]),
        e2e_ms=_percentiles([frame["e2e_ms"].to_numpy() for frame in completed]),
        handoff_gap_ms=_percentiles([frame["handoff_gap_ms"].drop_nulls().to_numpy() for frame in completed]),
        attained=attained(slo, latencies),
        good_per_s=sum(meets(slo, latency) for latency in latencies) / wall_s,
        client_cores=sum(record.client_cpu_s for record in records) / wall_s,
    )


def latencies_of(trial: TrialFrames) -> list[Latency]:
    """The latencies of every request sent, in order; a failed request has no TTFT."""
    names = ("outcome", "ttft_ms", "tpot_ms", "max_itl_ms")
    return [
        Latency(ttft_ms=ttft_ms, tpot_ms=tpot_ms, max_itl_ms=max_itl_ms)
        if outcome == "completed"
        else Latency(ttft_ms=None)
        for outcome, ttft_ms, tpot_ms, max_itl_ms in trial.requests.select(names).iter_rows()
    ]


type Rate = Literal["requests/s", "output tokens/s", "SLO attainment", "good requests/s"]


def rates(slo: Slo) -> Mapping[Rate, Callable[[TrialFrames], float]]:
    """The figures that each trial has one of, by name. More is better for all of them."""
    return {
        "requests/s": lambda trial: trial.completed.height / trial.record.wall_s,
        "output tokens/s": lambda trial: _total([trial.completed], "completion_tokens") / trial.record.wall_s,
        "SLO attainment": lambda trial: attained(slo, latencies_of(trial)),
        "good requests/s": lambda trial: sum(meets(slo, one) for one in latencies_of(trial)) / trial.record.wall_s,
    }


def goodputs(points: Sequence[tuple[Flat, PointSummary]], attainment: float) -> Mapping[str, float | None]:
    """The goodput by what points set besides the rate: the highest offered rate that attains it. Open loops only."""
    loads: dict[str, list[Offered]] = {}
    for swept, found in points:
        if found.offered_per_s is not None:
            rest = label({key: value for key, value in swept.items() if key not in RATE_KEYS})
            loads.setdefault(rest, []).append(Offered(rate_per_s=found.offered_per_s, attained=found.attained))
    return {rest: goodput(offered, attainment) for rest, offered in loads.items()}


def _total(frames: Sequence[pl.DataFrame], column: str) -> float:
    return sum(float(frame[column].to_numpy().sum()) for frame in frames)


def _percentiles(repeats: Sequence[np.ndarray]) -> tuple[float, ...]:
    found = [
        np.quantile(values, list(PERCENTILES.values()), method="inverted_cdf") for values in repeats if len(values)
    ]
    return tuple(map(float, np.mean(found, axis=0))) if found else ()
