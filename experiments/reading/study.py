"""What the notebook of a study works on: a run's tables, and a folder for its pictures, as its environment says.

MOONSHARD_RUN names the run; without it the newest under results/NAME is taken. MOONSHARD_PICTURES says where pictures
go; without it they go beside the notebook.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import matplotlib.pyplot as plt
import polars as pl
from matplotlib.figure import Figure

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.machine import ROOT
from moonshard.experiments.common.slo import Slo
from moonshard.experiments.reading.pictures.plots import draw_fit, draw_residuals
from moonshard.experiments.reading.report import slo_of
from moonshard.experiments.reading.step_fit import Kind, StepFit, fit_step_model, fit_table
from moonshard.experiments.reading.step_model import StepModel
from moonshard.experiments.reading.tables.frames import RunFrames
from moonshard.experiments.reading.tables.run_tables import RunTables, load_runs

DPI = 90
STEP_TIMES = "step_times.json"
PINNED_STUDIES = ("chunking", "pd_vs_aggregated")  # whose workers have a core each, and batches of all sizes


@dataclass(frozen=True, eq=False, slots=True)
class Study:
    name: str
    tables: RunTables
    pictures: Path

    @property
    def run(self) -> RunFrames:
        return self.tables.runs[0]

    @property
    def slo(self) -> Slo:
        return slo_of(self.run)

    def save_figure(self, figure: Figure, name: str) -> Path:
        """Saves NAME.png with a line below that says what it was measured on. OSError where it cannot be written."""
        figure.supxlabel(provenance(self.run), fontsize="x-small", color="0.4")
        path = self.pictures / f"{name}.png"
        self.pictures.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
        return path

    def step_times(self) -> pl.DataFrame:
        """How long steps took, fitted, as a table; the picture `steps` has what is left unexplained.

        A model for whoever simulates is saved where the recording is good for one: see `why_no_step_model`.
        """
        model, fits = fit_step_model(self.tables.steps, provenance(self.run))
        figure, panels = plt.subplots(2, len(fits), figsize=(9, 7), layout="constrained", squeeze=False)
        for (fitted, left), fit in zip(panels.T, fits.values(), strict=True):
            draw_fit(fitted, fit)
            draw_residuals(left, fit)
        self.save_figure(figure, "steps")
        why_not = self.why_no_step_model(fits)
        if why_not is None:
            self.save_step_model(model)
        else:
            print(f"No times of steps are kept of this run: {why_not}.")
        return fit_table(fits)

    def why_no_step_model(self, fits: Mapping[Kind, StepFit]) -> str | None:
        """Why the times are good only for this study's steps; None where they are whole and a device's own."""
        cores = [point.settings.get("cores") for point in self.run.record.points]
        if not all(isinstance(own, list) and own and len(set(own)) == len(own) for own in cores):
            return "workers had no cores of their own, so that steps waited for each other"
        unidentified = [f"{kind}: {name}" for kind, fit in fits.items() for name in fit.unidentified]
        return f"its steps do not tell {', '.join(unidentified)}" if unidentified else None

    def save_step_model(self, model: StepModel) -> Path:
        """Saves the fitted times as step_times.json. OSError where it cannot be written."""
        path = self.pictures / STEP_TIMES
        self.pictures.mkdir(parents=True, exist_ok=True)
        path.write_text(model.to_json())
        return path


def load_study(name: str, environment: Mapping[str, str], *, root: Path = ROOT) -> Study:
    """The study's run; everything lies below `root`. ExperimentError where there is no run, or another experiment's."""
    given = environment.get("MOONSHARD_RUN")
    tables = load_runs(Path(given) if given else newest_run(root / "results" / name))
    measured = tables.runs[0].record.name
    if measured != name:
        raise ExperimentError(f"{tables.runs[0].path}: a run of {measured}, not of {name}")
    pictures = environment.get("MOONSHARD_PICTURES")
    return Study(name, tables, Path(pictures) if pictures else root / "experiments" / "studies" / name)


def newest_run(folder: Path) -> Path:
    """The newest run below results/NAME with a finished trial. ExperimentError where there is none."""
    runs = sorted(path.parents[1] for path in folder.glob("*/point-*-repeat-*[0-9]/trial.json"))
    if not runs:
        raise ExperimentError(f"{folder}: no run; make one: moonshard experiment run experiments/studies/{folder.name}")
    return runs[-1]


def provenance(run: RunFrames) -> str:
    """One line: on what machine it was measured, when, and at which commits."""
    starts = run.record.starts
    days = dict.fromkeys(f"{datetime.fromisoformat(start.at):%Y-%m-%d}" for start in starts)
    commits = list(dict.fromkeys(start.commit for start in starts))
    machine = starts[-1].machine
    said = f"{'commits' if len(commits) > 1 else 'commit'} {', '.join(commits)}"
    missing = f", {run.whats_missing}" if run.whats_missing else ""
    return f"{machine['cores']} cores of {machine['cpu']}, {' and '.join(days)}, {said}{missing}"


def pinned_step_model(root: Path = ROOT) -> StepModel | None:
    """The step times that a study with pinned cores has saved; None where none has yet."""
    for name in PINNED_STUDIES:
        path = root / "experiments" / "studies" / name / STEP_TIMES
        if path.is_file():
            return StepModel.from_json(path.read_bytes())
    return None


def processor_time(tables: RunTables) -> pl.DataFrame:
    """Cores that each process took on average, by point; `load generator` shares the machine with the servers."""
    found = []
    for point in tables.points():
        wall_s = sum(trial.record.wall_s for trial in point.trials)
        spent_s = {"load generator": sum(trial.record.client_cpu_s for trial in point.trials)}
        for trial in point.trials:
            for process, cpu_s in trial.record.server_cpu_s.items():
                spent_s[process] = spent_s.get(process, 0.0) + cpu_s
        frame = pl.DataFrame({"process": list(spent_s), "cores": [cpu_s / wall_s for cpu_s in spent_s.values()]})
        found.append(tables.tagged(frame, point))
    return pl.concat(found)
