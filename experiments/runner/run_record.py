"""What run.json holds: what a run is of, what it ran on, and which of its trials are done."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.flat import Flat
from moonshard.experiments.runner.schema import VERSION
from moonshard.experiments.runner.sweep import Trial, interleaved
from moonshard.serving.observe.rows.schema import VERSION as TRACE_VERSION

State = Literal["pending", "done", "incomplete"]
MACHINE = ("cpu", "cores", "memory_gib")  # what of a machine two measurements have to share


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """A start of the run: the first, or a resumption after it was broken off."""

    at: str  # UTC
    commit: str
    versions: dict[str, str]
    machine: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRecord:
    number: int
    label: str
    state: State  # done: all its repeats are
    swept: Flat
    settings: Flat


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialState:
    name: str
    point: int
    repeat: int
    state: State = "pending"
    why: str | None = None  # it is incomplete


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What run.json holds."""

    schema_version: int
    trace_version: int  # of the tables that the server writes
    name: str
    state: State
    url: str | None
    given: Flat  # what config.toml and the command line say
    repeats: int
    starts: Sequence[RunStart] = ()
    points: Sequence[PointRecord] = ()
    trials: Sequence[TrialState] = ()


def read_run(path: Path) -> RunRecord:
    """Reads run.json. ExperimentError for a folder that has none, or one of another schema version."""
    file = path / "run.json"
    try:
        raw = msgspec.json.decode(file.read_bytes())
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        trace_version = raw.get("trace_version") if isinstance(raw, dict) else None
        if (version, trace_version) != (VERSION, TRACE_VERSION):
            raise ExperimentError(
                f"{path}: its tables are of schema version {version} (servers' {trace_version}), "
                f"and this is version {VERSION} (servers' {TRACE_VERSION})"
            )
        return msgspec.convert(raw, RunRecord)
    except OSError as error:
        raise ExperimentError(f"{path}: no run of an experiment: {file.name}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ExperimentError(f"{file}: {error}") from error


def code_changes(starts: Sequence[RunStart]) -> list[str]:
    """What differs between the starts: the commit, and versions of packages."""
    told = [{"commit": start.commit} | start.versions for start in starts]
    found = []
    for name in sorted({name for one in told for name in one}, key=lambda name: (name != "commit", name)):
        values = dict.fromkeys(one.get(name, "none") for one in told)
        if len(values) > 1:
            found.append(f"{name} {', then '.join(values)}")
    return found


def with_states(record: RunRecord, path: Path, whys: Mapping[str, str]) -> RunRecord:
    """The record with the states of the trial folders below `path`. `whys` says why trials are incomplete."""
    before = {state.name: state.why for state in record.trials}
    trials = []
    for trial in trials_of(record):
        is_done, why = (path / trial.name).is_dir(), whys.get(trial.name, before.get(trial.name))
        state: State = "done" if is_done else "incomplete" if why else "pending"
        own_why = None if is_done else why
        trials.append(TrialState(name=trial.name, point=trial.point, repeat=trial.repeat, state=state, why=own_why))
    points = [
        replace(point, state=_joint([trial.state for trial in trials if trial.point == point.number]))
        for point in record.points
    ]
    return replace(record, trials=trials, points=points, state=_joint([trial.state for trial in trials]))


def trials_of(record: RunRecord) -> Iterator[Trial]:
    """The trials in the order in which they run."""
    return interleaved(len(record.points), record.repeats)


def _joint(states: Sequence[State]) -> State:
    if "incomplete" in states:
        return "incomplete"
    return "done" if all(state == "done" for state in states) else "pending"
