"""A run's figures and its differences from another, against what a few made-up requests must come to."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.slo import Slo
from moonshard.experiments.reading.report import run_grids, slo_of
from moonshard.experiments.reading.summary import goodputs, point_summary
from moonshard.experiments.reading.tables.differences import Change, compare_point
from moonshard.experiments.reading.tables.frames import RunFrames, gaps_ms, load_run
from moonshard.experiments.reading.tables.matching import Pair
from tests.experiments.reading.made_up import run_frames, trial_frames


def compared(a: RunFrames, b: RunFrames, *, is_paired: bool = True) -> dict[str, Change]:
    points = a.record.points[0], b.record.points[0]
    pair = Pair(label="p", a=points[0], b=points[1], is_paired=is_paired)
    return {row.metric: row for row in compare_point(a, b, pair, Slo(ttft_ms=20))}


def test_figures_count_what_failed_and_measure_what_completed():
    found = point_summary(run_frames(trial_frames([10, 20, None]), trial_frames([30, 40, 50])), 0, Slo(ttft_ms=20))
    assert found is not None
    assert (found.num_repeats, found.num_requests, found.num_failed, found.num_late) == (2, 6, 1, 2)
    assert found.ttft_ms == ((10 + 40) / 2, (20 + 50) / 2, (20 + 50) / 2)
    assert found.itl_ms == (2, 2, 2)
    assert found.handoff_gap_ms == ()
    assert (found.attained, found.good_per_s) == (2 / 6, 2 / 4)
    assert (found.completed_per_s, found.output_tokens_per_s) == (5 / 4, 15 / 4)
    assert (found.cached_share, found.client_cores) == (0.2, 0.25)
    assert point_summary(run_frames(), 0, Slo()) is None


def test_goodput_is_told_for_each_group_of_points_that_differ_in_their_rate_alone():
    def at(mode: str, rate: float, ttft_ms: float):
        found = point_summary(run_frames(trial_frames([ttft_ms] * 4, offered_per_s=rate)), 0, Slo(ttft_ms=20))
        assert found is not None
        return {"server.mode": mode, "workload.rate_per_s": rate}, found

    points = [at("a", 1.0, 10), at("a", 2.0, 10), at("a", 4.0, 30), at("b", 1.0, 30)]
    assert goodputs(points, 0.9) == {"mode=a": 2.0, "mode=b": None}
    loads, latencies = run_grids(run_frames(trial_frames([10, 20, 30])))
    assert loads.notes == ("SLO: TTFT 20 ms.", "Goodput at 50%, as configured: 1.00 requests/s.")
    assert latencies.rows[0] == ("p", "TTFT", "20.0", "30.0", "30.0")
    assert [row[1] for row in latencies.rows] == ["TTFT", "ITL", "TPOT", "E2E"]


def test_a_shift_of_every_request_is_found_exactly_and_said_to_be_worse():
    before = [float(value) for value in range(10, 40)]
    after = [value + 3 for value in before]
    found = compared(run_frames(*[trial_frames(before)] * 3), run_frames(*[trial_frames(after)] * 3))
    for metric in ("TTFT p50, ms", "TTFT p90, ms", "E2E p99, ms"):
        row = found[metric]
        assert (row.found.difference, row.found.low, row.found.high) == pytest.approx((3, 3, 3))
        assert row.is_better is False
    assert (found["ITL p50, ms"].found.difference, found["ITL p50, ms"].is_better) == (0, None)
    assert "handoff gap p50, ms" not in found
    assert found["SLO attainment"].found.difference == pytest.approx((8 - 11) / 30)


def test_pairs_are_requests_that_completed_on_both_sides():
    found = compared(run_frames(trial_frames([10, 20, None, 1000])), run_frames(trial_frames([11, None, 7, 1001])))
    row = found["TTFT p99, ms"]
    assert (row.found.a, row.found.b) == (1000, 1001)
    assert (row.found.low, row.found.high) == (1, 1)
    assert found["requests/s"].found.low is None
    alone = compared(
        run_frames(trial_frames([10, 20, None])), run_frames(trial_frames([11, None, 7, 9])), is_paired=False
    )
    assert (alone["TTFT p99, ms"].found.a, alone["TTFT p99, ms"].found.b) == (20, 11)


def test_runs_of_other_requests_are_refused_as_pairs():
    with pytest.raises(ExperimentError, match="request 0 is not the same in A and B: planned_prompt_tokens 5 and 6"):
        compared(run_frames(trial_frames([1])), run_frames(trial_frames([1], prompt=6)))
    with pytest.raises(ExperimentError, match="its workload is"):
        compared(run_frames(trial_frames([1])), run_frames(trial_frames([1], workload={"seed": 1})))
    with pytest.raises(ExperimentError, match="no repeat is done in both runs"):
        compared(run_frames(trial_frames([1])), run_frames())


def test_gaps_stay_within_their_request():
    assert gaps_ms(trial_frames([1, None, 5], gap_ms=4)).rows() == [(0, 4.0), (0, 4.0), (2, 4.0), (2, 4.0)]


def test_tokens_of_one_message_have_no_gap_between_them():
    """Else a gateway that is behind, and sends several at once, would seem to be the faster."""
    together = trial_frames([1], gap_ms=4)
    stamps = pl.when(pl.col("index") == 1).then(pl.col("arrived_ns").shift(1)).otherwise(pl.col("arrived_ns"))
    assert together.tokens is not None
    late = replace(together, tokens=together.tokens.with_columns(arrived_ns=stamps))
    assert gaps_ms(late).rows() == [(0, 8.0)]


def test_what_was_cut_to_the_context_is_said():
    loads, _ = run_grids(run_frames(trial_frames([10]), trial_frames([20], num_clipped=3)))
    assert "p: 3 requests were cut to the context." in loads.notes


def test_objectives_that_cannot_be_read_are_refused_and_not_taken_for_none():
    run = run_frames(trial_frames([10]))
    point = replace(run.record.points[0], settings={"slo.itl_ms": 5})
    with pytest.raises(ExperimentError, match=r"r: slo\.itl_ms: unknown key; did you mean slo\.max_itl_ms"):
        slo_of(RunFrames(run.path, replace(run.record, points=[point]), run.trials))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ExperimentError, match="no run of an experiment"):
        load_run(tmp_path)
