"""A run as frames: every row with its point's keys, nothing of a warm-up; and what tables and pictures make of them."""

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from moonshard.experiments.lab.fields import ExperimentError
from moonshard.experiments.lab.intervals import percentile_table, rate_table
from moonshard.experiments.lab.plots import draw_cdf, draw_fit, draw_gaps_over_time, draw_intervals
from moonshard.experiments.lab.run_tables import RunTables, load
from moonshard.experiments.lab.step_fit import fit_model
from moonshard.experiments.lab.study import load_study, newest_run, processor_time
from tests.experiments.lab.made_up_run import GAP_MS, SWEEP, made_up_run

TAGS = ["run", "point", "label", "server.mode", "repeat"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return made_up_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def tables(run: Path) -> RunTables:
    return load(run)


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
    assert set(tables.latencies("itl", pl.col("place") == 1)["place"]) == {1}
    assert tables.latencies("handoff_gap").is_empty()
    assert tables.latencies("tpot")["ms"].to_list() == [GAP_MS] * 12


def test_runs_are_told_apart_and_keys_that_only_one_sweeps_are_null_in_the_other(run: Path, tmp_path: Path):
    sweep = SWEEP.replace('server.mode = ["aggregated", "disaggregated"]', "workload.rate_per_s = [1, 2.5]")
    other = made_up_run(tmp_path, "other", sweep)
    both = load(run, other)
    assert both.swept == ("server.mode", "workload.rate_per_s")
    assert both.requests["workload.rate_per_s"].dtype == pl.Float64
    assert both.requests.filter(run=run.name)["workload.rate_per_s"].null_count() == 16
    assert both.requests.filter(run=other.name)["server.mode"].null_count() == 16
    assert percentile_table(both, "ttft").select("run", "point").unique().height == 4


def test_a_run_without_tokens_has_latencies_but_no_gaps(tmp_path: Path):
    tables = load(made_up_run(tmp_path, has_tokens=False))
    assert tables.tokens.is_empty()
    assert tables.latencies("itl").is_empty()
    assert tables.latencies("ttft").height == 12
    assert percentile_table(tables, "itl").is_empty()


def test_a_run_of_which_nothing_is_done_is_refused_by_its_name(run: Path, tmp_path: Path):
    bare = shutil.copytree(run, tmp_path / "bare")
    for trial in bare.glob("point-*"):
        shutil.rmtree(trial)
    with pytest.raises(ExperimentError, match="bare: no trial of it is done"):
        load(bare)
    with pytest.raises(ExperimentError, match="no run of an experiment"):
        load(tmp_path)


def test_percentiles_by_point_lie_in_their_intervals(tables: RunTables):
    found = percentile_table(tables, "ttft")
    medians = found.filter(percentile="p50").sort("point")
    assert medians["ms"].to_list() == [2, 12]
    assert (medians["low"] <= medians["ms"]).all()
    assert (medians["ms"] <= medians["high"]).all()
    assert set(found["num_requests"]) == {6}
    assert percentile_table(tables, "ttft", {"p50": 0.5}, where=pl.col("place") < 2)["ms"].to_list() == [1, 11]


def test_rates_are_means_of_repeats(tables: RunTables):
    found = {(row["rate"], row["point"]): row for row in rate_table(tables).iter_rows(named=True)}
    assert found["requests/s", 0]["value"] == 3 / 2
    assert found["in SLO", 0]["value"] == 1 / 4
    assert found["in SLO", 1]["value"] == 0
    assert found["good requests/s", 0]["num_repeats"] == 2
    assert found["output tokens/s", 0]["low"] == 9 / 2


def test_who_took_the_processors_is_told_by_process(tables: RunTables):
    found = processor_time(tables).filter(point=0).select("process", "cores").rows()
    assert found == [("load generator", 0.25), ("gateway", 0.5)]


def test_pictures_show_what_is_there(tables: RunTables):
    cdf, lines, gaps, fitted = Figure().subplots(1, 4)
    draw_cdf(cdf, tables.latencies("ttft"), "server.mode")
    assert [line.get_label() for line in cdf.lines] == ["aggregated", "disaggregated"]
    assert cdf.lines[0].get_xdata().tolist() == [1, 1, 2, 2, 3, 3]
    draw_cdf(gaps, tables.latencies("handoff_gap"))
    draw_intervals(lines, percentile_table(tables, "ttft"), "point", "percentile")
    assert [line.get_label() for line in lines.lines] == ["p50", "p90", "p99"]
    _, fits = fit_model(tables.steps)
    draw_fit(fitted, fits["decode"])
    assert fits["decode"].median_error < 1e-6


@pytest.mark.parametrize(("has_steps", "num_marks"), [(True, 3), (False, 4)])
def test_gaps_over_time_have_prefills_below_or_else_arrivals(tables: RunTables, has_steps: bool, num_marks: int):
    steps = tables.steps if has_steps else tables.steps.clear()
    known = RunTables(tables.runs, tables.swept, tables.requests, tables.tokens, tables.server_requests, steps)
    axes = Figure().subplots()
    draw_gaps_over_time(axes, known, tables.runs[0].path.name, 0, 0)
    assert len(axes.patches) == num_marks
    (points,) = axes.collections
    offsets = np.asarray(points.get_offsets())
    assert offsets[:, 1].tolist() == [GAP_MS] * 6
    assert offsets[0, 0] == pytest.approx(0.005)


def test_a_study_reads_the_newest_run_or_the_one_that_is_named(tmp_path: Path):
    runs = [made_up_run(tmp_path, "mini") for _ in range(2)]
    assert newest_run(tmp_path / "results" / "mini") == runs[1]
    study = load_study("mini", {}, root=tmp_path)
    assert study.run.path == runs[1]
    assert study.pictures == tmp_path / "experiments" / "mini"
    named = load_study("mini", {"MOONSHARD_RUN": str(runs[0]), "MOONSHARD_PICTURES": str(tmp_path / "p")})
    assert named.run.path == runs[0]
    path = named.save(Figure(layout="constrained"), "empty")
    assert path == tmp_path / "p" / "empty.png"
    assert path.is_file()


def test_a_study_without_a_run_says_how_to_make_one_and_refuses_that_of_another(run: Path, tmp_path: Path):
    with pytest.raises(ExperimentError, match="moonshard experiment run experiments/none"):
        load_study("none", {}, root=tmp_path)
    with pytest.raises(ExperimentError, match="a run of made_up, not of none"):
        load_study("none", {"MOONSHARD_RUN": str(run)})
