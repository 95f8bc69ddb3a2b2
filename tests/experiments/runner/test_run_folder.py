"""The folder of a run: what is done is told by folders alone, whatever happened; foreign ones are refused by name."""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from moonshard.experiments.command import Run, experiment
from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.machine import describe_machine
from moonshard.experiments.runner import run_folder
from moonshard.experiments.runner.experiment import Experiment, load_experiment
from moonshard.experiments.runner.run import RunIncomplete, run_all
from moonshard.experiments.runner.run_folder import KILLED, new_run, resumed_run
from moonshard.experiments.runner.run_record import RunRecord, code_changes, read_run
from moonshard.experiments.runner.sweep import interleaved
from moonshard.experiments.runner.trial import TrialFailed
from tests.experiments.reading.made_up import made_up_run
from tests.experiments.runner.test_experiment import BASE, folder

SWEEP = BASE + "[sweep]\nworkload.rate_per_s = [1, 2]\n"


class Killed(BaseException):
    """Stands for what no `except Exception` sees."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Experiment:
    return load_experiment(folder(tmp_path_factory.mktemp("asked"), SWEEP))


@settings(max_examples=10)
@given(st.lists(st.sampled_from(("done", "fails", "killed")), max_size=8))
def test_whatever_happens_a_run_goes_on_with_what_is_not_done(asked: Experiment, fates: list[str]):
    trials = list(interleaved(len(asked.points), asked.options.repeats))
    done: list[str] = []
    with tempfile.TemporaryDirectory() as out:
        with new_run(Path(out), asked) as run:
            path = run.path
        for fate in fates:
            with resumed_run(path, asked) as run:
                left = run.left()
                assert [trial.name for trial in left] == [t.name for t in trials if t.name not in done]
                if not left:
                    break
                if fate == "killed":  # the block is left without a word, as by SIGKILL
                    (path / f"{left[0].name}.part").mkdir(exist_ok=True)
                    (path / f"{left[0].name}.part" / "half").touch()
                    continue
                try:
                    with run.trial(left[0]) as part:
                        assert list(part.iterdir()) == []
                        (part / "whole").write_text(left[0].name)
                        if fate == "fails":
                            raise Killed("the server died")
                except Killed:
                    pass
                else:
                    done.append(left[0].name)
                run.write()
        record = read_run(path)
        states = {trial.name: trial.state for trial in record.trials}
        assert {name for name, state in states.items() if state == "done"} == set(done)
        assert all((path / name / "whole").read_text() == name for name in done)
        assert (record.state == "done") == (len(done) == len(trials))
        for point in record.points:
            own = {trial.state for trial in record.trials if trial.point == point.number}
            assert (point.state == "done") == (own == {"done"})
        assert all((trial.why is not None) == (trial.state == "incomplete") for trial in record.trials)


def test_a_trial_that_failed_says_why_until_it_is_done(asked: Experiment, tmp_path: Path):
    with new_run(tmp_path, asked) as run:
        first = run.left()[0]
        with pytest.raises(Killed), run.trial(first):
            raise Killed("decode 0 ended with code -9")
        run.write()
    assert (run.path / f"{first.name}.incomplete").is_dir()
    told = next(trial for trial in read_run(run.path).trials if trial.name == first.name)
    assert (told.state, told.why) == ("incomplete", "decode 0 ended with code -9")
    with resumed_run(run.path, asked) as run:
        with run.trial(first):
            pass
        run.write()
    assert not list(run.path.glob("*.incomplete"))
    record = read_run(run.path)
    assert (record.trials[0].state, record.trials[0].why, len(record.starts)) == ("done", None, 2)


def test_two_processes_do_not_run_one_folder(asked: Experiment, tmp_path: Path):
    with new_run(tmp_path, asked) as run, pytest.raises(ExperimentError, match="another process runs it"):  # noqa: SIM117
        with resumed_run(run.path, asked):
            pass


def test_a_run_goes_on_as_it_began(asked: Experiment, tmp_path: Path):
    with new_run(tmp_path, asked) as run:
        pass
    other = replace(asked, given={**asked.given, "workload.num_requests": 7, "slo.ttft_ms": 1})
    with pytest.raises(ExperimentError) as refused, resumed_run(run.path, other):
        pass
    assert [fault.partition(": ")[2] for fault in refused.value.faults] == [
        "slo.ttft_ms was None and is 1; a run goes on as it began",
        "workload.num_requests was 6 and is 7; a run goes on as it began",
    ]


def test_a_run_does_not_go_on_with_another_file(asked: Experiment, tmp_path: Path):
    with new_run(tmp_path, asked) as run:
        pass
    point = asked.points[0]
    other = replace(point, settings={**point.settings, "workload.digest": "b"})
    with (
        pytest.raises(ExperimentError, match=r"workload\.digest was None and is 'b'"),
        resumed_run(run.path, replace(asked, points=[other, *asked.points[1:]])),
    ):
        pass


def test_a_run_does_not_go_on_on_another_machine(asked: Experiment, tmp_path: Path, monkeypatch):
    with new_run(tmp_path, asked) as run:
        pass
    machine = describe_machine() | {"cpu": "other", "load_average_before": 99.0}
    monkeypatch.setattr("moonshard.experiments.runner.run_folder.describe_machine", lambda: machine)
    with pytest.raises(ExperimentError) as refused, resumed_run(run.path, asked):
        pass
    assert len(refused.value.faults) == 1
    assert "machine.cpu was " in refused.value.faults[0]


def test_a_run_that_goes_on_with_other_code_names_what_changed(asked: Experiment, tmp_path: Path, monkeypatch):
    with new_run(tmp_path, asked) as run:
        (before,) = run.record.starts
        assert code_changes(run.record.starts) == []
    for name, value in (("commit", "other"), ("versions", before.versions | {"jax": "0"})):
        monkeypatch.setattr(f"moonshard.experiments.runner.run_folder.describe_{name}", lambda value=value: value)
    with resumed_run(run.path, asked) as run:
        assert code_changes(run.record.starts) == [
            f"commit {before.commit}, then other",
            f"jax {before.versions['jax']}, then 0",
        ]


def test_a_run_whose_code_changed_says_so_also_in_its_summary(tmp_path: Path, capsys):
    path = made_up_run(tmp_path)
    told = json.loads((path / "run.json").read_text())
    told["starts"].append(told["starts"][0] | {"commit": "other"})
    (path / "run.json").write_text(json.dumps(told))
    assert experiment(Run(folder=tmp_path / "made_up", out=tmp_path / "results", resume=Path(path.name))) == 0
    change = f"commit {told['starts'][0]['commit']}, then other"
    assert f"not all of this run is measured with the same code: {change}\n" in capsys.readouterr().err
    assert f"Measured with more than one code: {change}." in (path / "summary.md").read_text()


def test_a_summary_that_cannot_be_written_is_said(tmp_path: Path, capsys):
    path = made_up_run(tmp_path)
    (path / "summary.md").mkdir()
    assert experiment(Run(folder=tmp_path / "made_up", out=tmp_path / "results", resume=path)) == 1
    assert f"incomplete: {path}/summary.md: Is a directory\n" in capsys.readouterr().err


def test_a_runner_that_was_killed_is_told_of_when_its_run_goes_on(asked: Experiment, tmp_path: Path):
    with new_run(tmp_path, asked) as run:
        first, second = run.left()[:2]
        with run.trial(first):
            pass
        (run.path / f"{second.name}.part").mkdir()
    with resumed_run(run.path, asked):
        told = {trial.name: (trial.state, trial.why) for trial in read_run(run.path).trials}
    assert (told[first.name], told[second.name]) == (("done", None), ("incomplete", KILLED))


def test_what_another_process_has_added_meanwhile_is_kept(asked: Experiment, tmp_path: Path, monkeypatch):
    """It has run, and ended, between the look at the folder and its lock."""
    with new_run(tmp_path, asked) as run:
        pass
    own_read, others = run_folder.read_run, [run.path]

    def read_late(path: Path) -> RunRecord:
        found = own_read(path)
        if others:
            with resumed_run(others.pop(), asked):
                pass
        return found

    monkeypatch.setattr(run_folder, "read_run", read_late)
    with resumed_run(run.path, asked) as run:
        assert len(run.record.starts) == 3


@pytest.mark.parametrize("is_told", [True, False])
def test_a_run_that_is_done_is_not_started_again(asked: Experiment, tmp_path: Path, is_told: bool):
    """Nor is it where its runner was killed before run.json said so."""
    with new_run(tmp_path, asked) as run:
        for trial in run.left():
            with run.trial(trial):
                pass
        if is_told:
            run.write()
    with resumed_run(run.path, asked) as again:
        assert again.left() == []
    record = read_run(run.path)
    assert (record.state, len(record.starts)) == ("done", 1)


def test_each_start_of_each_run_names_its_requests_otherwise(asked: Experiment, tmp_path: Path):
    with new_run(tmp_path, asked) as run:
        first = run.id_prefix
    with resumed_run(run.path, asked) as run:
        second = run.id_prefix
    with new_run(tmp_path, asked) as run:
        assert len({first, second, run.id_prefix}) == 3


def test_a_folder_that_is_gone_ends_the_run_with_its_name(asked: Experiment, tmp_path: Path, monkeypatch):
    """As where it cannot be written any more: what was measured is told apart from what could not be kept."""

    def remove(*_: object) -> None:
        shutil.rmtree(run.path)
        raise TrialFailed("the disk is gone")

    monkeypatch.setattr("moonshard.experiments.runner.run.run_trial", remove)
    with (
        new_run(tmp_path, asked) as run,
        pytest.raises(RunIncomplete, match=f"point-000-repeat-0: {run.path}: No such"),
    ):
        run_all(asked, run, Console(quiet=True))


@pytest.mark.parametrize("key", ["schema_version", "trace_version"])
def test_a_run_of_another_schema_version_is_refused_by_its_name(asked: Experiment, tmp_path: Path, key: str):
    with new_run(tmp_path, asked) as run:
        pass
    file = run.path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: 0}))
    with pytest.raises(ExperimentError, match=f"{run.path.name}: its tables are of schema version .*0"):
        read_run(run.path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 1}'])
def test_a_file_that_tells_of_no_run_is_refused(tmp_path: Path, text: str):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ExperimentError, match=str(tmp_path)):
        read_run(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys):
    asked = Run(folder=folder(tmp_path, SWEEP), out=tmp_path, resume=Path("none"))
    assert experiment(asked) == 2
    assert "none: no run of an experiment: run.json: No such file" in capsys.readouterr().err


def test_results_that_cannot_be_written_are_refused_by_their_name(tmp_path: Path, capsys):
    (tmp_path / "file").touch()
    assert experiment(Run(folder=folder(tmp_path, SWEEP), out=tmp_path / "file")) == 2
    assert f"--out {tmp_path / 'file'}: " in capsys.readouterr().err
