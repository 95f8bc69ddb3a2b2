"""A run's figures and its differences from another, against what a few made-up requests must come to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from moonshard.experiments.lab.differences import Row, compare_point
from moonshard.experiments.lab.fields import ExperimentError
from moonshard.experiments.lab.figures import goodputs, point_figures
from moonshard.experiments.lab.flat import Flat
from moonshard.experiments.lab.frames import RunFrames, TrialFrames, gaps_ms, load_run
from moonshard.experiments.lab.goodput import Slo
from moonshard.experiments.lab.matching import Pair
from moonshard.experiments.lab.report import run_grids
from moonshard.experiments.lab.run_folder import PointRecord, RunRecord, Start, TrialState
from moonshard.experiments.lab.trial import TrialRecord
from moonshard.rpc.types import ModelInfo

MODEL = ModelInfo(
    model="m", max_context_tokens=9, vocab_size=9, stop_token_ids=(), has_tokenizer=False, dtype="float32",
    fingerprint="f", version="0",
)  # fmt: skip
MS = 1_000_000
SETTINGS: Flat = {"workload.rate_per_s": 1.0, "slo.ttft_ms": 20.0, "slo.attainment": 0.5}


def trial(ttfts_ms: Sequence[float | None], gap_ms: float = 2.0, prompt: int = 5, **told: Any) -> TrialFrames:
    """A request for each TTFT, with three tokens; None: it failed."""
    rows = [
        {
            "place": place,
            "outcome": "unavailable" if ttft_ms is None else "completed",
            "ttft_ms": ttft_ms,
            "tpot_ms": None if ttft_ms is None else gap_ms,
            "max_itl_ms": None if ttft_ms is None else gap_ms,
            "e2e_ms": (ttft_ms or 0.0) + 2 * gap_ms,
            "handoff_gap_ms": None,
            "completion_tokens": 0 if ttft_ms is None else 3,
            "prompt_tokens": None if ttft_ms is None else prompt,
            "cached_tokens": None if ttft_ms is None else 1,
            "planned_prompt_tokens": prompt,
            "max_tokens": 3,
            "session": None,
            "turn": 0,
        }
        for place, ttft_ms in enumerate(ttfts_ms)
    ]
    tokens = [
        {"place": row["place"], "index": index, "arrived_ns": 7 * MS + round(index * gap_ms * MS)}
        for row in rows
        for index in range(row["completion_tokens"])
    ]
    floats = dict.fromkeys(("ttft_ms", "tpot_ms", "max_itl_ms", "handoff_gap_ms"), pl.Float64)
    record = TrialRecord(
        **{
            "trial": "x", "point": 0, "repeat": 0, "begun_at": "", "workload": {"seed": 0}, "model": MODEL,
            "is_open": True, "offered_per_s": 1.0, "num_planned": len(rows), "num_clipped": 0, "num_sent": len(rows),
            "num_failed": sum(one is None for one in ttfts_ms), "num_late": 1, "wall_s": 2.0, "client_cpu_s": 0.5,
        } | told,
    )  # fmt: skip
    requests = pl.DataFrame(rows, schema_overrides={**floats, "prompt_tokens": pl.Int64, "cached_tokens": pl.Int64})
    return TrialFrames(record, requests, pl.DataFrame(tokens, schema=dict.fromkeys(tokens[0], pl.Int64)))


def run(*repeats: TrialFrames) -> RunFrames:
    point = PointRecord(number=0, label="p", state="done", swept={}, settings=SETTINGS)
    states = [TrialState(name="x", point=0, repeat=repeat, state="done") for repeat in range(len(repeats))]
    start = Start(at="", commit="c", versions={}, machine={})
    record = RunRecord(
        schema_version=1, trace_version=1, name="r", state="done", url=None, given={}, repeats=len(repeats),
        starts=[start], points=[point], trials=states,
    )  # fmt: skip
    return RunFrames(Path("r"), record, {(0, repeat): one for repeat, one in enumerate(repeats)})


def compared(a: RunFrames, b: RunFrames, *, is_paired: bool = True) -> dict[str, Row]:
    points = a.record.points[0], b.record.points[0]
    pair = Pair(label="p", a=points[0], b=points[1], is_paired=is_paired)
    return {row.metric: row for row in compare_point(a, b, pair, Slo(ttft_ms=20))}


def test_figures_count_what_failed_and_measure_what_completed():
    found = point_figures(run(trial([10, 20, None]), trial([30, 40, 50])), 0, Slo(ttft_ms=20))
    assert found is not None
    assert (found.num_repeats, found.num_requests, found.num_failed, found.num_late) == (2, 6, 1, 2)
    assert found.ttft_ms == ((10 + 40) / 2, (20 + 50) / 2, (20 + 50) / 2)
    assert found.itl_ms == (2, 2, 2)
    assert found.handoff_gap_ms == ()
    assert (found.attained, found.good_per_s) == (2 / 6, 2 / 4)
    assert (found.completed_per_s, found.output_tokens_per_s) == (5 / 4, 15 / 4)
    assert (found.cached_share, found.client_cores) == (0.2, 0.25)
    assert point_figures(run(), 0, Slo()) is None


def test_goodput_is_told_for_each_group_of_points_that_differ_in_their_rate_alone():
    def at(mode: str, rate: float, ttft_ms: float):
        found = point_figures(run(trial([ttft_ms] * 4, offered_per_s=rate)), 0, Slo(ttft_ms=20))
        assert found is not None
        return {"server.mode": mode, "workload.rate_per_s": rate}, found

    points = [at("a", 1.0, 10), at("a", 2.0, 10), at("a", 4.0, 30), at("b", 1.0, 30)]
    assert goodputs(points, 0.9) == {"mode=a": 2.0, "mode=b": None}
    loads, latencies = run_grids(run(trial([10, 20, 30])))
    assert loads.notes == ("SLO: TTFT 20 ms.", "Goodput at 50%, as configured: 1.00 requests/s.")
    assert latencies.rows[0] == ("p", "TTFT", "20.0", "30.0", "30.0")
    assert [row[1] for row in latencies.rows] == ["TTFT", "ITL", "TPOT", "E2E"]


def test_a_shift_of_every_request_is_found_exactly_and_said_to_be_worse():
    before = [float(value) for value in range(10, 40)]
    after = [value + 3 for value in before]
    found = compared(run(*[trial(before)] * 3), run(*[trial(after)] * 3))
    for metric in ("TTFT p50, ms", "TTFT p90, ms", "E2E p99, ms"):
        row = found[metric]
        assert (row.found.difference, row.found.low, row.found.high) == pytest.approx((3, 3, 3))
        assert row.is_better is False
    assert (found["ITL p50, ms"].found.difference, found["ITL p50, ms"].is_better) == (0, None)
    assert "handoff gap p50, ms" not in found
    assert found["in SLO"].found.difference == pytest.approx((8 - 11) / 30)


def test_pairs_are_requests_that_completed_on_both_sides():
    found = compared(run(trial([10, 20, None, 1000])), run(trial([11, None, 7, 1001])))
    row = found["TTFT p99, ms"]
    assert (row.found.a, row.found.b) == (1000, 1001)
    assert (row.found.low, row.found.high) == (1, 1)
    assert found["requests/s"].found.low is None
    alone = compared(run(trial([10, 20, None])), run(trial([11, None, 7, 9])), is_paired=False)
    assert (alone["TTFT p99, ms"].found.a, alone["TTFT p99, ms"].found.b) == (20, 11)


def test_runs_of_other_requests_are_refused_as_pairs():
    with pytest.raises(ExperimentError, match="request 0 is not the same in A and B: planned_prompt_tokens 5 and 6"):
        compared(run(trial([1])), run(trial([1], prompt=6)))
    with pytest.raises(ExperimentError, match="its workload is"):
        compared(run(trial([1])), run(trial([1], workload={"seed": 1})))
    with pytest.raises(ExperimentError, match="no repeat is done in both runs"):
        compared(run(trial([1])), run())


def test_gaps_stay_within_their_request():
    assert gaps_ms(trial([1, None, 5], gap_ms=4)).rows() == [(0, 4.0), (0, 4.0), (2, 4.0), (2, 4.0)]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ExperimentError, match="no run of an experiment"):
        load_run(tmp_path)
