"""What a study's notebook works on: the run that is meant, where its pictures go, and which times of steps are kept."""

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import polars as pl
import pytest
from matplotlib.figure import Figure

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.step_fit import fit_step_model
from moonshard.experiments.reading.study import (
    Study,
    load_study,
    newest_run,
    pinned_step_model,
    processor_time,
    provenance,
)
from moonshard.experiments.reading.tables.frames import RunFrames
from moonshard.experiments.reading.tables.run_tables import RunTables, load_runs
from moonshard.experiments.runner.run_record import RunStart
from tests.experiments.reading.made_up import made_up_run
from tests.experiments.reading.test_step_fit import TIMES_OF_ALL, made_up


def test_who_took_the_processors_is_told_by_process(tables: RunTables):
    found = processor_time(tables).filter(point=0).select("process", "cores").rows()
    assert found == [("load generator", 0.25), ("gateway", 0.5)]


def test_a_study_reads_the_newest_run_or_the_one_that_is_named(tmp_path: Path):
    runs = [made_up_run(tmp_path, "mini") for _ in range(2)]
    assert newest_run(tmp_path / "results" / "mini") == runs[1]
    study = load_study("mini", {}, root=tmp_path)
    assert study.run.path == runs[1]
    assert study.pictures == tmp_path / "experiments" / "studies" / "mini"
    assert (study.slo.ttft_ms, study.slo.attainment) == (1, 0.9)
    named = load_study("mini", {"MOONSHARD_RUN": str(runs[0]), "MOONSHARD_PICTURES": str(tmp_path / "p")})
    assert named.run.path == runs[0]
    path = named.save_figure(Figure(layout="constrained"), "empty")
    assert path == tmp_path / "p" / "empty.png"
    assert path.is_file()


def test_a_study_without_a_run_says_how_to_make_one_and_refuses_that_of_another(run: Path, tmp_path: Path):
    with pytest.raises(ExperimentError, match="moonshard experiment run experiments/studies/none"):
        load_study("none", {}, root=tmp_path)
    with pytest.raises(ExperimentError, match="a run of made_up, not of none"):
        load_study("none", {"MOONSHARD_RUN": str(run)})


def test_provenance_names_every_commit_and_day(run: Path):
    found = load_runs(run).runs[0]
    starts = [
        RunStart(at=f"2026-11-{day}T00:00:00+00:00", commit=commit, versions={}, machine={"cores": 2, "cpu": "fast"})
        for day, commit in ((23, "a"), (23, "a+"), (24, "a+"))
    ]
    twice = RunFrames(found.path, replace(found.record, starts=starts), found.trials)
    assert provenance(twice) == "2 cores of fast, 2026-11-23 and 2026-11-24, commits a, a+"


def study_with(tables: RunTables, steps: pl.DataFrame, cores: list[int], pictures: Path) -> Study:
    """Whose workers had these cores and took these steps."""
    own = tables.runs[0]
    points = [replace(point, settings={**point.settings, "cores": cores}) for point in own.record.points]
    run = RunFrames(own.path, replace(own.record, points=points), own.trials)
    frames = tables.requests, tables.tokens, tables.server_requests
    return Study("x", RunTables([run], tables.swept, *frames, steps), pictures)


@pytest.mark.parametrize(
    ("cores", "varies", "said"),
    [
        ([0, 1], True, None),
        ([0, 1, 0, 1], True, "workers had no cores of their own"),
        ([], True, "workers had no cores of their own"),
        ([0, 1], False, "do not tell decode: each row, us"),
    ],
)
def test_times_of_steps_are_kept_where_they_are_a_devices_own_and_whole(
    tables: RunTables, tmp_path: Path, cores: list[int], varies: bool, said: str | None
):
    decode = made_up(TIMES_OF_ALL, "decode", 0)
    steps = pl.concat([made_up(TIMES_OF_ALL, "prefill", 0), decode if varies else decode.filter(bucket=4)])
    study = study_with(tables, steps, cores, tmp_path / "experiments" / "studies" / "chunking")
    _, fits = fit_step_model(steps)
    why_not = study.why_no_step_model(fits)
    assert why_not is None if said is None else said in (why_not or "")
    table = study.step_times()
    plt.close("all")
    assert table["kind"].to_list() == ["prefill", "decode"]
    assert (study.pictures / "steps.png").is_file()
    model = pinned_step_model(tmp_path)
    assert (model is None) == (said is not None)
    if model is not None:
        assert model.prefill.row_us == pytest.approx(TIMES_OF_ALL.row_us, rel=1e-3)


def test_a_table_shows_all_of_its_rows_columns_and_texts_once_a_run_is_loaded(run: Path):
    wide = pl.DataFrame({f"column {number}": ["a long text of a label " * 4] * 40 for number in range(20)})
    with pl.Config(restore_defaults=True):
        for shown in (str(wide), wide._repr_html_()):
            assert "\u2026" in shown or "&hellip;" in shown
        load_runs(run)
        for shown in (str(wide), wide._repr_html_()):
            assert "\u2026" not in shown
            assert "&hellip;" not in shown
