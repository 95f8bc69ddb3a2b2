"""Two runs on disk side by side, as a notebook asks for it."""

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.report import run_grids
from moonshard.experiments.reading.study import newest_run, provenance
from moonshard.experiments.reading.tables.comparing import compare_runs
from moonshard.experiments.reading.tables.frames import load_run
from tests.experiments.reading.made_up import SWEEP, made_up_run


def test_a_comparison_is_a_frame_and_a_table_of_the_same_rows(run: Path):
    found = compare_runs(run, run, a_where={"server.mode": "aggregated"}, b_where={"server.mode": "disaggregated"})
    (ttft,) = found.rows.filter(metric="TTFT p50, ms").rows(named=True)
    assert (ttft["a"], ttft["b"], ttft["difference"], ttft["num_repeats"]) == (2.0, 12.0, 10.0, 2)
    shown = found._repr_markdown_()
    assert shown == repr(found)
    assert all(f"| {metric} |" in shown for metric in found.rows["metric"])
    assert len([line for line in shown.splitlines() if line.startswith("| ")]) == found.rows.height + 2


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("ttft_ms = 1", "ttft_ms = 2"), "slo.ttft_ms"),
        (("[slo]", "[client]\ntemperature = 1\n[slo]"), "client.temperature"),
        (("output_tokens = 8", "output_tokens = 9"), "workload.output_tokens"),
        (("max_slots = 4", "max_slots = 5"), "server.decode.max_slots"),
    ],
)
def test_runs_that_measured_different_things_are_refused_by_the_key_and_let_through_by_it(
    run: Path, tmp_path: Path, change: tuple[str, str], key: str
):
    assert change[0] in SWEEP
    other = made_up_run(tmp_path, sweep=SWEEP.replace(*change))
    with pytest.raises(ExperimentError, match=f"{key} is ") as refused:
        compare_runs(run, other)
    assert len(refused.value.faults) == 2  # and the advice
    assert compare_runs(run, other, despite=[key]).rows.height
    with pytest.raises(ExperimentError, match=f"{key} is "):
        compare_runs(run, other, despite=["url"])


def edited(path: Path, **told: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | told))


@pytest.mark.parametrize("repeat", [0, 1])
def test_a_model_that_one_repeat_alone_has_is_refused_by_its_name(run: Path, tmp_path: Path, repeat: int):
    other = made_up_run(tmp_path)
    trial = other / f"point-001-repeat-{repeat}" / "trial.json"
    edited(trial, model=json.loads(trial.read_text())["model"] | {"fingerprint": "g"})
    with pytest.raises(ExperimentError, match=r"model\.fingerprint is "):
        compare_runs(run, other)


def test_packages_of_every_start_are_told(run: Path, tmp_path: Path):
    other = made_up_run(tmp_path)
    (start,) = json.loads((other / "run.json").read_text())["starts"]
    now = start["versions"]["jax"]
    edited(other / "run.json", starts=[start | {"versions": start["versions"] | {"jax": "0.1"}}, start])
    assert f"jax is {now} in A and 0.1, then {now} in B" in compare_runs(run, other)._repr_markdown_()


def test_a_trial_of_another_schema_version_is_refused_by_its_folder(run: Path, tmp_path: Path):
    other = made_up_run(tmp_path)
    edited(other / "point-000-repeat-1" / "trial.json", schema_version=1)
    with pytest.raises(ExperimentError, match="point-000-repeat-1: of schema version 1"):
        compare_runs(run, other)


@pytest.mark.parametrize("name", ["requests", "tokens"])
def test_a_table_of_another_version_is_refused_by_its_folder(run: Path, tmp_path: Path, name: str):
    other = made_up_run(tmp_path)
    table = tmp_path / "table.parquet"
    pl.read_parquet(other / "point-000-repeat-0" / f"{name}.parquet").with_columns(version=99).write_parquet(table)
    table.rename(other / "point-000-repeat-0" / f"{name}.parquet")
    with pytest.raises(ExperimentError, match=r"point-000-repeat-0: of schema version \d \(tables' 1, 99\)"):
        compare_runs(run, other)


def test_what_both_have_done_is_compared_and_what_is_missing_is_said(run: Path, tmp_path: Path):
    broken = made_up_run(tmp_path)
    for repeat in range(2):
        shutil.rmtree(broken / f"point-001-repeat-{repeat}")
    found = compare_runs(run, broken)
    assert len(set(found.rows["point"])) == 1
    assert "B is incomplete: 2 of 4 trials are done" in found._repr_markdown_()
    loads, _ = run_grids(load_run(broken))
    assert "This run is incomplete: 2 of 4 trials are done." in loads.notes
    assert provenance(load_run(broken)).endswith("incomplete: 2 of 4 trials are done")
    for repeat in range(2):
        shutil.rmtree(broken / f"point-000-repeat-{repeat}")
    with pytest.raises(ExperimentError, match="no point has a repeat that is done in both runs"):
        compare_runs(run, broken)
    with pytest.raises(ExperimentError, match="no run"):
        newest_run(broken.parent)
