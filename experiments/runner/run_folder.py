"""The folder of a run: results/NAME/STAMP with run.json and a folder for each trial, and what of it is done.

A trial is done when its folder has its name, which it gets when all of it is written. Until then it ends in `.part`;
what a trial left that did not finish ends in `.incomplete`. run.json says the same for people, and everything else that
two runs have to share to be compared. Whoever runs holds the folder's lock, which ends with the process.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.machine import describe_commit, describe_machine, describe_versions
from moonshard.experiments.common.signals import held
from moonshard.experiments.runner.experiment import Experiment
from moonshard.experiments.runner.run_record import (
    MACHINE,
    PointRecord,
    RunRecord,
    RunStart,
    read_run,
    trials_of,
    with_states,
)
from moonshard.experiments.runner.schema import VERSION
from moonshard.experiments.runner.sweep import Trial
from moonshard.serving.observe.rows.schema import VERSION as TRACE_VERSION

KILLED = "its runner was killed"


@dataclass(slots=True)
class RunFolder:
    """A run's folder, which this process has locked."""

    path: Path
    record: RunRecord
    whys: dict[str, str] = field(default_factory=dict)  # of the trials that did not finish since the last start

    @property
    def id_prefix(self) -> str:
        """The prefix of request ids of this start of this run, and of no other."""
        return f"{self.path.name}-{len(self.record.starts)}"

    def left(self) -> list[Trial]:
        """The trials that are not finished, in the order in which they run."""
        return [trial for trial in trials_of(self.record) if not (self.path / trial.name).is_dir()]

    @contextlib.contextmanager
    def trial(self, trial: Trial) -> Iterator[Path]:
        """A new folder to write to; it counts if the block ends without error. Leftovers of earlier tries go first."""
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
        """Writes run.json as things are now: completely, or not at all with OSError."""
        self.record = with_states(self.record, self.path, self.whys)
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
    """Makes a new run under `out`. ExperimentError where that cannot be written."""
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
    """Opens a run that was broken off. If all its trials are finished, no new start is recorded.

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
    """Why something ended, as one line for people."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _check_same(path: Path, record: RunRecord, experiment: Experiment, start: RunStart) -> None:
    """Refuses to resume with other settings, other points (a file may have changed), or on another machine."""
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


def _machine(start: RunStart) -> dict[str, object]:
    return {f"machine.{key}": start.machine.get(key) for key in MACHINE}


def _plain(value: object) -> bytes:
    return msgspec.json.encode(value)


def _this_start() -> RunStart:
    return RunStart(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=describe_commit(),
        versions=describe_versions(),
        machine=describe_machine(),
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the folder's lock. ExperimentError where another process has it."""
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
    """Turns what cannot be written into an ExperimentError."""
    try:
        yield
    except OSError as error:
        raise ExperimentError(f"{option}: {explained(error)}") from error
