"""Loads that are told by a capacity: by what the closed loop of the same repeat got done, and by nothing else."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.runner.capacity import with_rate
from moonshard.experiments.runner.experiment import Experiment, load_experiment
from moonshard.experiments.runner.sweep import Trial
from moonshard.experiments.runner.trial import TrialFailed
from moonshard.experiments.workload.options import FixedOptions
from tests.experiments.reading.made_up import trial_frames
from tests.experiments.runner.test_experiment import BASE, folder

CLOSED = '[[points]]\nworkload.kind = "fixed"\nworkload.num_requests = 6\nworkload.num_clients = 2\n'
RELATIVE = '[[points]]\nworkload = { kind = "relative", times_capacity = 3, lasts_s = 8 }\n'
SHARED = BASE.replace('kind = "fixed"\n', "").replace("num_requests = 6\n", "")


def asked(tmp_path: Path) -> Experiment:
    return load_experiment(folder(tmp_path, SHARED + CLOSED + RELATIVE))


def write_first_point(run: Path, repeat: int, *, num_sent: int, num_failed: int, wall_s: float) -> None:
    trial = run / Trial(repeat=repeat, point=0).name
    trial.mkdir()
    record = replace(trial_frames([1.0]).record, num_sent=num_sent, num_failed=num_failed, wall_s=wall_s)
    (trial / "trial.json").write_bytes(msgspec.json.encode(record))


def test_a_rate_is_that_many_times_what_completed_a_second_in_the_same_repeat(tmp_path: Path):
    experiment = asked(tmp_path)
    write_first_point(tmp_path, 0, num_sent=3, num_failed=1, wall_s=4.0)
    write_first_point(tmp_path, 1, num_sent=3, num_failed=0, wall_s=1.0)
    for repeat, rate_per_s in ((0, 1.5), (1, 9.0)):
        told = with_rate(experiment, Trial(repeat=repeat, point=1), tmp_path).points[1].workload
        assert isinstance(told, FixedOptions)
        assert (told.rate_per_s, told.num_requests) == (rate_per_s, rate_per_s * 8)
        assert with_rate(experiment, Trial(repeat=repeat, point=0), tmp_path) is experiment


def test_where_nothing_was_got_done_there_is_no_rate(tmp_path: Path):
    write_first_point(tmp_path, 0, num_sent=2, num_failed=2, wall_s=4.0)
    with pytest.raises(TrialFailed, match="point-000-repeat-0 got nothing done"):
        with_rate(asked(tmp_path), Trial(repeat=0, point=1), tmp_path)
    with pytest.raises(FileNotFoundError):
        with_rate(asked(tmp_path), Trial(repeat=1, point=1), tmp_path)


@pytest.mark.parametrize("points", [RELATIVE, RELATIVE + CLOSED, CLOSED + "workload.rate_per_s = 2\n" + RELATIVE])
def test_loads_are_refused_before_a_server_starts_where_no_closed_loop_is_first(tmp_path: Path, points: str):
    with pytest.raises(ExperimentError, match="loads are told by what the first point gets done"):
        load_experiment(folder(tmp_path, SHARED + points))
