"""What the notebook of a study works on: a run's tables, and a folder for its pictures, as its environment says.

MOONSHARD_RUN names the run; without it the newest under results/NAME is taken. MOONSHARD_PICTURES says where pictures
go; without it they go beside the notebook.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from moonshard.experiments.bench.machine import ROOT
from moonshard.experiments.lab.fields import ExperimentError
from moonshard.experiments.lab.frames import RunFrames
from moonshard.experiments.lab.run_tables import RunTables, load
from moonshard.experiments.lab.step_model import StepModel

DPI = 90


@dataclass(frozen=True, eq=False, slots=True)
class Study:
    name: str
    tables: RunTables
    pictures: Path

    @property
    def run(self) -> RunFrames:
        return self.tables.runs[0]

    def save(self, figure: Figure, name: str) -> Path:
        """As NAME.png, with what it was measured on below. OSError where that cannot be written."""
        figure.supxlabel(source(self.run), fontsize="x-small", color="0.4")
        path = self.pictures / f"{name}.png"
        self.pictures.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
        return path

    def keep(self, model: StepModel) -> Path:
        """As step_times.json, for whoever simulates. OSError where that cannot be written."""
        path = self.pictures / "step_times.json"
        self.pictures.mkdir(parents=True, exist_ok=True)
        path.write_text(model.to_json())
        return path


def load_study(name: str, environment: Mapping[str, str], *, root: Path = ROOT) -> Study:
    """ExperimentError where there is no run, or it is another experiment's. Everything lies below `root`."""
    given = environment.get("MOONSHARD_RUN")
    tables = load(Path(given) if given else newest_run(root / "results" / name))
    measured = tables.runs[0].record.name
    if measured != name:
        raise ExperimentError(f"{tables.runs[0].path}: a run of {measured}, not of {name}")
    pictures = environment.get("MOONSHARD_PICTURES")
    return Study(name, tables, Path(pictures) if pictures else root / "experiments" / name)


def newest_run(folder: Path) -> Path:
    """Of results/NAME. ExperimentError where there is none."""
    runs = sorted(path.parent for path in folder.glob("*/run.json"))
    if not runs:
        raise ExperimentError(f"{folder}: no run; make one: moonshard experiment run experiments/{folder.name}")
    return runs[-1]


def source(run: RunFrames) -> str:
    """What it was measured on, and when, in a line."""
    start = run.record.starts[-1]
    day = f"{datetime.fromisoformat(start.at):%Y-%m-%d}"
    return f"{start.machine['cores']} cores of {start.machine['cpu']}, {day}, commit {start.commit}"


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
