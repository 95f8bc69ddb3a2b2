"""Runs what of an experiment is left, trial by trial, and shows how far it is."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.text import Text

from moonshard.experiments.common.running.server import ServerFailed
from moonshard.experiments.common.signals import held
from moonshard.experiments.runner.capacity import with_rate
from moonshard.experiments.runner.experiment import Experiment
from moonshard.experiments.runner.run_folder import RunFolder, explained
from moonshard.experiments.runner.run_record import trials_of
from moonshard.experiments.runner.sending import Sender
from moonshard.experiments.runner.sweep import Trial
from moonshard.experiments.runner.trial import TrialFailed, TrialRecord, run_trial
from moonshard.rpc.status import RequestError
from moonshard.rpc.types import ModelInfo
from moonshard.serving.observe.rows.parts import load_polars


class RunIncomplete(Exception):
    """The run ended before all trials were done; the message names the trial and says why."""


def run_all(experiment: Experiment, folder: RunFolder, console: Console) -> None:
    """RunIncomplete when a trial does not finish: what is there stays, and resuming begins with that trial.

    WorkloadError where the workload does not fit the model that is served.
    """
    load_polars()
    left = folder.left()
    num_trials = len(experiment.points) * experiment.options.repeats
    with _progress(console) as progress:
        bar = progress.add_task("", total=None)
        for number, trial in enumerate(left, start=num_trials - len(left) + 1):
            place = f"{number}/{num_trials}"
            title = f"{experiment.points[trial.point].label}, repeat {trial.repeat + 1}"
            progress.update(bar, description=f"{place}: starting: {title}", total=None, completed=0)

            def tell(sender: Sender, place: str = place, title: str = title) -> None:
                said = f"{sender.num_sent} sent, {sender.num_failed} failed, {sender.num_late} late"
                done, total = len(sender.asked), sender.num_planned
                progress.update(bar, description=f"{place}: {said}: {title}", total=total, completed=done)

            record = _run_one(experiment, folder, trial, tell)
            progress.print(Text(f"{place}: {title}: {_outcome(record)}", style="dim"), soft_wrap=True)


def _outcome(record: TrialRecord) -> str:
    said = f"{record.num_sent} requests, {record.num_failed} failed, {record.num_late} late"
    cut = f", {record.num_clipped} cut to the context" if record.num_clipped else ""
    return f"{said}{cut}, {record.wall_s:.1f} s"


def _run_one(experiment: Experiment, folder: RunFolder, trial: Trial, tell: Callable[[Sender], None]) -> TrialRecord:
    """Runs one trial. run.json records how it ended, as long as it can still be written."""
    try:
        with folder.trial(trial) as part:
            told = with_rate(experiment, trial, folder.path)
            prefix, before = f"{folder.id_prefix}-{trial.name}", _model_before(folder, trial)
            record = run_trial(told, trial, prefix, part, _environment(), tell, before)
            if record.why_incomplete is not None:
                raise TrialFailed(record.why_incomplete)
        return record
    except (ServerFailed, TrialFailed, RequestError, OSError) as error:
        raise RunIncomplete(f"{trial.name}: {explained(error)}") from error
    finally:
        with held():
            _write(folder, trial)


def _model_before(folder: RunFolder, trial: Trial) -> ModelInfo | None:
    """The model of the finished trials of the same point, or of any point where one server serves all.

    None while there is none.
    """
    for other in trials_of(folder.record):
        file = folder.path / other.name / "trial.json"
        if (other.point == trial.point or folder.record.url is not None) and file.is_file():
            return msgspec.json.decode(file.read_bytes(), type=TrialRecord).model
    return None


def _environment() -> dict[str, str]:
    """The environment without OTEL_ variables: they would make servers send spans, and no record would say so."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}


def _write(folder: RunFolder, trial: Trial) -> None:
    try:
        folder.write()
    except OSError as error:
        raise RunIncomplete(f"{trial.name}: {folder.path}: {error.strerror}") from error


class _Description(ProgressColumn):
    """The label cut to one line and not parsed as markup, which it may look like."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


def _progress(console: Console) -> AbstractContextManager[Progress]:
    """Drawn only twice a second, since the process that draws it also sends the requests."""
    columns = (BarColumn(bar_width=12), TimeElapsedColumn(), _Description())
    return Progress(*columns, console=console, refresh_per_second=2, transient=True, disable=not console.is_terminal)
