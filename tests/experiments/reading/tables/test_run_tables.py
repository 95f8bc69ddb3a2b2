"""A run as frames: every row with its point's keys, and nothing of a warm-up."""

import shutil
from pathlib import Path

import polars as pl
import pytest

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.tables.run_tables import RunTables, load_runs
from tests.experiments.reading.made_up import GAP_MS, SWEEP, made_up_run

TAGS = ["run", "point", "label", "server.mode", "repeat"]


def test_every_frame_says_of_which_point_and_repeat_its_rows_are(run: Path, tables: RunTables):
    for frame in (tables.requests, tables.tokens, tables.server_requests, tables.steps):
        assert set(TAGS) <= set(frame.columns)
        assert set(frame["run"]) == {run.name}
        modes = frame.select("point", "label", "server.mode").unique().sort("point").rows()
        assert modes == [(0, "mode=aggregated", "aggregated"), (1, "mode=disaggregated", "disaggregated")]
        assert set(frame["repeat"]) == {0, 1}
    assert tables.swept == ("server.mode",)


def test_nothing_of_a_warm_up_is_left(tables: RunTables):
    assert tables.server_requests.height == tables.requests.height == 16
    assert not tables.server_requests["request_id"].str.contains("warmup").any()
    assert tables.steps["number"].unique().sort().to_list() == [0, 1, 2, 3, 4, 5]


def test_latencies_are_of_what_completed_and_of_those_that_are_asked_for(tables: RunTables):
    assert tables.latencies("ttft").filter(point=1, repeat=0)["ms"].to_list() == [11, 12, 13]
    assert set(tables.latencies("itl")["ms"]) == {GAP_MS}
    assert tables.latencies("itl").height == 4 * 3 * 2
    assert set(tables.latencies("itl", pl.col("request_index") == 1)["request_index"]) == {1}
    assert tables.latencies("handoff_gap").is_empty()
    assert tables.latencies("tpot")["ms"].to_list() == [GAP_MS] * 12


def test_runs_are_told_apart_and_keys_that_only_one_sweeps_are_null_in_the_other(run: Path, tmp_path: Path):
    sweep = SWEEP.replace('server.mode = ["aggregated", "disaggregated"]', "workload.rate_per_s = [1, 2.5]")
    other = made_up_run(tmp_path, "other", sweep)
    both = load_runs(run, other)
    assert both.swept == ("server.mode", "workload.rate_per_s")
    assert both.requests["workload.rate_per_s"].dtype == pl.Float64
    assert both.requests.filter(run=run.name)["workload.rate_per_s"].null_count() == 16
    assert both.requests.filter(run=other.name)["server.mode"].null_count() == 16


def test_a_run_without_tokens_has_latencies_but_no_gaps(tmp_path: Path):
    tables = load_runs(made_up_run(tmp_path, has_tokens=False))
    assert tables.tokens.is_empty()
    assert tables.latencies("itl").is_empty()
    assert tables.latencies("ttft").height == 12


def test_a_run_of_which_nothing_is_done_is_refused_by_its_name(run: Path, tmp_path: Path):
    bare = shutil.copytree(run, tmp_path / "bare")
    for trial in bare.glob("point-*"):
        shutil.rmtree(trial)
    with pytest.raises(ExperimentError, match="bare: no trial of it is done"):
        load_runs(bare)
    with pytest.raises(ExperimentError, match="no run of an experiment"):
        load_runs(tmp_path)
