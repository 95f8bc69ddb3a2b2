"""The folder of a run: results/NAME/STAMP with run.json and a folder for each trial, and what of it is done.

A trial is done when its folder has its name, which it gets when all of it is written. Until then it ends in `.part`;
what a trial left that did not finish ends in `.incomplete`. run.json says the same for people, and everything else that
two runs have to share to be compared. Whoever runs holds the folder's lock, which ends with the process.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from moonshard.experiments.bench.machine import describe_commit, describe_machine, describe_versions
from moonshard.experiments.lab.experiment import Experiment
from moonshard.experiments.lab.fields import ExperimentError
from moonshard.experiments.lab.flat import Flat
from moonshard.experiments.lab.schema import VERSION
from moonshard.experiments.lab.signals import held
from moonshard.experiments.lab.sweep import Trial, interleaved
from moonshard.serving.trace.schema import VERSION as TRACE_VERSION

State = Literal["pending", "done", "incomplete"]
KILLED = "its runner was killed"
MACHINE = ("cpu", "cores", "memory_gib")  # what of a machine two measurements have to share


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The run, or its going on after it was broken off."""

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
    starts: Sequence[Start] = ()
    points: Sequence[PointRecord] = ()
    trials: Sequence[TrialState] = ()


@dataclass(slots=True)
class RunFolder:
    """A run's folder, which this process has locked."""

    path: Path
    record: RunRecord
    whys: dict[str, str] = field(default_factory=dict)  # of the trials that did not finish since the last start

    @property
    def id_prefix(self) -> str:
        """Of the requests of this start of this run, and of no other."""
        return f"{self.path.name}-{len(self.record.starts)}"

    def left(self) -> list[Trial]:
        """What is not done, in the order in which it runs."""
        return [trial for trial in _trials(self.record) if not (self.path / trial.name).is_dir()]

    @contextlib.contextmanager
    def trial(self, trial: Trial) -> Iterator[Path]:
        """A new folder to write into, which counts when the block ends well; what was left of an earlier try goes."""
        part = self.path / f"{trial.name}.part"
        incomplete = part.with_suffix(".incomplete")
        try:
            for old in (part, incomplete):
                if old.exists():
                    shutil.rmtree(old)
            part.mkdir()
            yield part
            part.rename(self.path / trial.name)
        except BaseException as error:
            with held():
                self.whys[trial.name] = explained(error)
                with contextlib.suppress(OSError):  # a full disk is what is told of then, not its consequence
                    part.rename(incomplete)
            raise

    def write(self) -> None:
        """run.json as it is now: all of it, or nothing and OSError."""
        self.record = _told(self.record, self.path, self.whys)
        temporary = self.path / "run.json.part"
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self.record), indent=1) + b"\n")
            temporary.rename(self.path / "run.json")
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def new_run(out: Path, experiment: Experiment) -> Iterator[RunFolder]:
    """A new run under `out`. ExperimentError where that cannot be written."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%fZ")
    path = out / experiment.name / stamp
    record = RunRecord(
        schema_version=VERSION,
        trace_version=TRACE_VERSION,
        name=experiment.name,
        state="pending",
        url=experiment.url,
        given=experiment.given,
        repeats=experiment.options.repeats,
        points=[
            PointRecord(number=p.number, label=p.label, state="pending", swept=p.swept, settings=p.settings)
            for p in experiment.points
        ],
    )
    folder = RunFolder(path, replace(record, starts=[_this_start()]))
    with _writing(f"--out {out}"):
        path.mkdir(parents=True)
    with _locked(path):
        try:
            with _writing(f"--out {out}"):
                folder.write()
        except ExperimentError:
            shutil.rmtree(path, ignore_errors=True)  # nobody can go on with it
            raise
        yield folder


@contextlib.contextmanager
def resumed_run(path: Path, experiment: Experiment) -> Iterator[RunFolder]:
    """A run that was broken off. Where nothing of it is left, this is no start of it.

    ExperimentError where there is none, or it is another experiment's, or another machine's, or runs now.
    """
    read_run(path)  # where there is none, it says so
    with _locked(path):
        record = read_run(path)  # as whoever ran it left it
        start = _this_start()
        _check_same(path, record, experiment, start)
        folder = RunFolder(path, record)
        left = folder.left()
        if left:
            folder.record = replace(record, starts=[*record.starts, start])
        folder.whys = {trial.name: KILLED for trial in left if (path / f"{trial.name}.part").is_dir()}
        with _writing(f"--resume {path}"):
            folder.write()
        yield folder


def explained(error: BaseException) -> str:
    """What ended something, in a line for people."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def code_changes(starts: Sequence[Start]) -> list[str]:
    """What is not the same in all of them: the commit, and versions of packages."""
    told = [{"commit": start.commit} | start.versions for start in starts]
    found = []
    for name in sorted({name for one in told for name in one}, key=lambda name: (name != "commit", name)):
        values = dict.fromkeys(one.get(name, "none") for one in told)
        if len(values) > 1:
            found.append(f"{name} {', then '.join(values)}")
    return found


def read_run(path: Path) -> RunRecord:
    """ExperimentError for a folder that has no run, or one of another schema version."""
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


def _check_same(path: Path, record: RunRecord, experiment: Experiment, start: Start) -> None:
    """What is said, what that comes to (a file may hold something else by now), and where."""
    if record.name != experiment.name:
        raise ExperimentError(f"{path}: a run of {record.name}, not of {experiment.name}")
    pairs: list[tuple[Mapping[str, object], Mapping[str, object]]] = [
        (
            {**record.given, "--url": record.url, "repeats": record.repeats},
            {**experiment.given, "--url": experiment.url, "repeats": experiment.options.repeats},
        ),
        *((one.settings, other.settings) for one, other in zip(record.points, experiment.points, strict=False)),
        *((_machine(one), _machine(start)) for one in record.starts),
    ]
    faults = [
        f"{path}: {key} was {before.get(key)!r} and is {now.get(key)!r}; a run goes on as it began"
        for before, now in pairs
        for key in sorted({*before, *now})
        if _plain(before.get(key)) != _plain(now.get(key))
    ]
    if faults:
        raise ExperimentError(*dict.fromkeys(faults))


def _machine(start: Start) -> dict[str, object]:
    return {f"machine.{key}": start.machine.get(key) for key in MACHINE}


def _plain(value: object) -> bytes:
    return msgspec.json.encode(value)


def _told(record: RunRecord, path: Path, whys: Mapping[str, str]) -> RunRecord:
    """With the states that the folders are in."""
    before = {state.name: state.why for state in record.trials}
    trials = []
    for trial in _trials(record):
        is_done, why = (path / trial.name).is_dir(), whys.get(trial.name, before.get(trial.name))
        state: State = "done" if is_done else "incomplete" if why else "pending"
        own_why = None if is_done else why
        trials.append(TrialState(name=trial.name, point=trial.point, repeat=trial.repeat, state=state, why=own_why))
    points = [
        replace(point, state=_joint([trial.state for trial in trials if trial.point == point.number]))
        for point in record.points
    ]
    return replace(record, trials=trials, points=points, state=_joint([trial.state for trial in trials]))


def _joint(states: Sequence[State]) -> State:
    if "incomplete" in states:
        return "incomplete"
    return "done" if all(state == "done" for state in states) else "pending"


def _trials(record: RunRecord) -> Iterator[Trial]:
    return interleaved(len(record.points), record.repeats)


def _this_start() -> Start:
    return Start(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=describe_commit(),
        versions=describe_versions(),
        machine=describe_machine(),
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """ExperimentError where another process has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ExperimentError(f"{path}: another process runs it at this moment") from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(option: str) -> Iterator[None]:
    """ExperimentError for what cannot be written."""
    try:
        yield
    except OSError as error:
        raise ExperimentError(f"{option}: {explained(error)}") from error
