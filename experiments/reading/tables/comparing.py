"""Two runs side by side: first whether they may be compared at all, then what changed, as a table."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import polars as pl

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.grid import Grid, as_markdown, number
from moonshard.experiments.common.intervals import MIN_REPEATS
from moonshard.experiments.reading.report import clipped, slo_of
from moonshard.experiments.reading.tables.differences import Change, compare_point, shared_repeats
from moonshard.experiments.reading.tables.frames import RunFrames, load_run
from moonshard.experiments.reading.tables.matching import Pair, Pick, matched, models_differ

COLUMNS = ("point", "metric", "A", "B", "B less A", "95% interval", "B is")


def compare(
    a_path: Path, b_path: Path, of_a: Pick, of_b: Pick, despite: Sequence[str], *, seed: int = 0
) -> tuple[Grid, list[Change]]:
    """The comparison over what both runs have finished. ExperimentError naming each undeclared difference."""
    a, b = load_run(a_path), load_run(b_path)
    pairs = matched(a.record, b.record, of_a, of_b, despite)
    _check_models(a, b, pairs, [*despite, *of_a.given, *of_b.given])
    done = [pair for pair in pairs if shared_repeats(a, b, pair)]
    if not done:
        raise ExperimentError("no point has a repeat that is done in both runs")
    rows = [row for pair in done for row in compare_point(a, b, pair, slo_of(a), seed=seed)]
    return _grid(a, b, done, rows), rows


@dataclass(frozen=True, eq=False, slots=True)
class Comparison:
    """What changed: a notebook shows it as a table, and `rows` has it as a frame."""

    grid: Grid
    changes: Sequence[Change]

    @property
    def rows(self) -> pl.DataFrame:
        """A row for each metric of each point: A's and B's value, B's less A's, and its 95% interval."""
        return pl.DataFrame(list(map(_told, self.changes)))

    def __repr__(self) -> str:
        return as_markdown(self.grid)

    def _repr_markdown_(self) -> str:
        return as_markdown(self.grid)


def compare_runs(
    a: Path | str,
    b: Path | str,
    *,
    a_where: Mapping[str, object] = MappingProxyType({}),
    b_where: Mapping[str, object] = MappingProxyType({}),
    despite: Sequence[str] = (),
    seed: int = 0,
) -> Comparison:
    """What changed from A to B at the points of both, or at those with the values in `a_where` and `b_where`.

    ExperimentError naming each difference that is neither there nor in `despite`.
    """
    chosen = Pick(option="a_where", given=dict(a_where)), Pick(option="b_where", given=dict(b_where))
    return Comparison(*compare(Path(a), Path(b), *chosen, despite, seed=seed))


def _told(change: Change) -> dict[str, object]:
    found = change.found
    return {"point": change.point, "metric": change.metric, **asdict(found), "difference": found.difference}


def write_rows(path: Path, rows: Sequence[Change]) -> None:
    """Writes JSON: a record for each metric of each point. ExperimentError where it cannot be written."""
    try:
        path.write_text(json.dumps(list(map(_told, rows)), indent=1) + "\n")
    except OSError as error:
        raise ExperimentError(f"--json {path}: {error.strerror}") from error


def _check_models(a: RunFrames, b: RunFrames, pairs: Sequence[Pair], declared: Sequence[str]) -> None:
    faults = [
        fault
        for pair in pairs
        for one in a.of_point(pair.a.number)
        for other in b.of_point(pair.b.number)
        for fault in models_differ(asdict(one.record.model), asdict(other.record.model), declared)
    ]
    if faults:
        raise ExperimentError(*dict.fromkeys(faults))


def _grid(a: RunFrames, b: RunFrames, pairs: Sequence[Pair], rows: Sequence[Change]) -> Grid:
    notes = [f"{name}: {run.path}, commit {_commits(run)}" for name, run in (("A", a), ("B", b))]
    notes += [f"{name} is {run.whats_missing}" for name, run in (("A", a), ("B", b)) if run.whats_missing]
    notes += _version_notes(a, b)
    left_out = [
        f"{name} has {len(run.record.points) - len(pairs)} points that are not compared"
        for name, run in (("A", a), ("B", b))
        if len(run.record.points) > len(pairs)
    ]
    notes += _interval_notes(rows)
    notes += _clipped_notes(a, b, pairs)
    unpaired = [pair.label for pair in pairs if not pair.is_paired]
    notes += [f"not paired by request, since the requests differ: {', '.join(unpaired)}"] if unpaired else []
    return Grid(title="B beside A", columns=COLUMNS, rows=tuple(map(_row, rows)), notes=(*notes, *left_out))


def _interval_notes(rows: Sequence[Change]) -> Iterator[str]:
    """Notes on what the intervals cover."""
    counts = {row.found.num_repeats for row in rows}
    if several := sorted(counts - {1}):
        said = " or ".join(map(str, several))
        yield f"95% intervals by Student's t over {said} repeats: what changes from one repeat to the next"
    if 1 in counts:
        yield "95% intervals of a single repeat by blocks of its requests: not what changes from one repeat to the next"
    if min(counts, default=MIN_REPEATS) < MIN_REPEATS:
        yield f"better and worse are said from {MIN_REPEATS} repeats on"


def _clipped_notes(a: RunFrames, b: RunFrames, pairs: Sequence[Pair]) -> Iterator[str]:
    for pair in pairs:
        for name, run, point in (("A", a, pair.a), ("B", b, pair.b)):
            if num_clipped := sum(trial.record.num_clipped for trial in run.of_point(point.number)):
                yield f"{pair.label}: in {name} {clipped(num_clipped)}"


def _version_notes(a: RunFrames, b: RunFrames) -> list[str]:
    """Notes on package versions that differ in any start of either run: these are never silent."""
    ours, theirs = _versions(a), _versions(b)
    return [
        f"{name} is {ours.get(name)} in A and {theirs.get(name)} in B"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


def _versions(run: RunFrames) -> dict[str, str]:
    """Versions by package; several where a run went on with another one."""
    names = {name for start in run.record.starts for name in start.versions}
    return {
        name: ", then ".join(dict.fromkeys(start.versions.get(name, "none") for start in run.record.starts))
        for name in names
    }


def _commits(run: RunFrames) -> str:
    return ", ".join(dict.fromkeys(start.commit for start in run.record.starts))


def _row(change: Change) -> tuple[str, ...]:
    found = change.found
    interval = "-" if found.low is None or found.high is None else f"{_signed(found.low)} to {_signed(found.high)}"
    verdict = {None: "-", True: "better", False: "worse"}[change.is_better]
    return (change.point, change.metric, number(found.a), number(found.b), _signed(found.difference), interval, verdict)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"
