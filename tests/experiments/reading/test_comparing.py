"""Two runs on disk side by side, as a notebook asks for it."""

import shutil
from pathlib import Path

import pytest

from moonshard.experiments.lab.fields import ExperimentError
from moonshard.experiments.reading.comparing import compare_runs
from moonshard.experiments.reading.frames import load_run
from moonshard.experiments.reading.report import run_grids
from moonshard.experiments.reading.study import newest_run, provenance
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
