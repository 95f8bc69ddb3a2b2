"""Loads told by what the server can do: so many times the requests a second that the run's first point gets done.

That point is a closed loop, and its trial in the same repeat is what counts: a machine is never the same for long.
"""

from dataclasses import replace
from pathlib import Path

import msgspec

from moonshard.experiments.runner.experiment import Experiment
from moonshard.experiments.runner.sweep import Trial
from moonshard.experiments.runner.trial import TrialFailed, TrialRecord
from moonshard.experiments.workload.options import RelativeOptions


def with_rate(experiment: Experiment, trial: Trial, run: Path) -> Experiment:
    """The experiment with this trial's rate worked out from its repeat of the first point, read from folder `run`.

    TrialFailed where that got nothing done, or does not say what. OSError where it cannot be read.
    """
    point = experiment.points[trial.point]
    if not isinstance(point.workload, RelativeOptions):
        return experiment
    points = list(experiment.points)
    points[trial.point] = replace(point, workload=point.workload.at(_capacity_per_s(run, trial.repeat)))
    return replace(experiment, points=points)


def _capacity_per_s(run: Path, repeat: int) -> float:
    name = Trial(repeat=repeat, point=0).name
    try:
        record = msgspec.json.decode((run / name / "trial.json").read_bytes(), type=TrialRecord)
    except msgspec.DecodeError as error:
        raise TrialFailed(f"{name}/trial.json: {error}") from error
    num_completed = record.num_sent - record.num_failed
    if not num_completed:
        raise TrialFailed(f"{name} got nothing done: there is no capacity to tell a load by")
    return num_completed / record.wall_s
