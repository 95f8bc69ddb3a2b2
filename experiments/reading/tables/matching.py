"""Which points of two runs belong together, and what speaks against comparing them. Pure.

Two runs are compared point by point where they set the same. What A and B are chosen by (`--a`, `--b`) differs on
purpose, and so does what `--despite` names; any other difference is refused, since it would be read as the effect.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moonshard.experiments.common.fields import ExperimentError, unknown_key
from moonshard.experiments.common.flat import Flat, overridden
from moonshard.experiments.runner.run_record import MACHINE, PointRecord, RunRecord
from moonshard.experiments.runner.sweep import label

MODEL = ("fingerprint", "dtype", "vocab_size", "max_context_tokens")  # what two models have to share
# Keys that say where something is, and nothing of what it does.
WHEREABOUTS = frozenset(
    {
        *("server.gateway.host", "server.gateway.port", "server.gateway.grpc_port", "server.gateway.ledger"),
        *("server.worker.host", "server.worker.port", "server.prefill.port", "server.decode.port", "server.kv.ports"),
        "workload.path",  # what is in the file is in workload.digest
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A point of A and one of B. Paired: both had the same requests, by their indices."""

    label: str
    a: PointRecord
    b: PointRecord
    is_paired: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """What `--a` or `--b` says: keys and values of the points that are meant; none means all."""

    option: str
    given: Flat

    def of(self, record: RunRecord) -> list[PointRecord]:
        """The points that this pick means. ExperimentError for a key that no point has, or where none is left."""
        known = {key for point in record.points for key in point.settings}
        if unknown := [key for key in self.given if key not in known]:
            raise ExperimentError(*(f"{self.option} {unknown_key(key, sorted(known))}" for key in unknown))
        found = [p for p in record.points if all(p.settings.get(key) == value for key, value in self.given.items())]
        if not found:
            said = " ".join(f"{key}={value}" for key, value in self.given.items())
            raise ExperimentError(f"{self.option} {said}: {record.name} has no such point")
        return found


def choice(option: str, texts: Sequence[str]) -> Pick:
    """Reads texts of the form `key=value`. ExperimentError for any other form."""
    try:
        return Pick(option=option, given=overridden({}, texts))
    except ValueError as error:
        raise ExperimentError(str(error).replace("--set", option, 1)) from error


def matched(a: RunRecord, b: RunRecord, of_a: Pick, of_b: Pick, despite: Collection[str] = ()) -> list[Pair]:
    """The pairs in the order of A's points; points that only one run has are left out.

    Raises:
        ExperimentError: no point is in both, two of one side are alike, a difference that nobody has declared, or a
        declared key that neither run has. Every difference is named once.
    """
    _check_declared(despite, (a, b))
    declared = {*despite, *of_a.given, *of_b.given}
    set_by_points = {key for record in (a, b) for point in record.points for key in point.swept}
    swept = {key for key in set_by_points if not _is_declared(key, declared)}
    by_key = [_by_key(side, of.of(side), swept, of.option) for side, of in ((a, of_a), (b, of_b))]
    pairs = [(point, by_key[1][key]) for key, point in by_key[0].items() if key in by_key[1]]
    if not pairs:
        raise ExperimentError(f"{a.name} and {b.name} have no point in common")
    faults = [
        *(fault for one, other in pairs for fault in _differences(one.settings, other.settings, declared)),
        *_machine_differences(a, b, declared),
        *([f"url is {a.url!r} in A and {b.url!r} in B"] if a.url != b.url and "url" not in declared else []),
    ]
    if faults:
        advice = "they measured different things; a difference that is meant is named with --a, --b or --despite"
        raise ExperimentError(*dict.fromkeys(faults), advice)
    keeps_cache = a.url is not None or b.url is not None  # where each run sends requests of its own
    return [_pair(one, other, swept, may_pair=not keeps_cache) for one, other in pairs]


def _check_declared(despite: Collection[str], records: Sequence[RunRecord]) -> None:
    known = {key for record in records for point in record.points for key in point.settings}
    known |= {"url", *(f"machine.{key}" for key in MACHINE), *(f"model.{key}" for key in MODEL)}
    unknown = [name for name in despite if not any(_is_declared(key, [name]) for key in known)]
    if unknown:
        raise ExperimentError(*(f"--despite {unknown_key(name, sorted(known))}" for name in unknown))


def _by_key(
    record: RunRecord, points: Sequence[PointRecord], swept: Collection[str], option: str
) -> dict[str, PointRecord]:
    found: dict[str, PointRecord] = {}
    for point in points:
        key = repr([point.settings.get(name) for name in sorted(swept)])
        if key in found:
            raise ExperimentError(
                f"{option}: {record.name} has {found[key].label!r} and {point.label!r}, which differ only in what was "
                f"declared; choose one with {option} KEY=VALUE"
            )
        found[key] = point
    return found


def _differences(a: Flat, b: Flat, declared: Collection[str]) -> Iterator[str]:
    for key in sorted({*a, *b} - WHEREABOUTS):
        if a.get(key) != b.get(key) and not _is_declared(key, declared):
            yield f"{key} is {a.get(key)!r} in A and {b.get(key)!r} in B"


def _is_declared(key: str, declared: Collection[str]) -> bool:
    """Whether a difference was declared; naming a table declares every key in it."""
    return any(key == name or key.startswith(f"{name}.") for name in declared)


def _machine_differences(a: RunRecord, b: RunRecord, declared: Collection[str]) -> Iterator[str]:
    machines = [{tuple(str(start.machine.get(key)) for key in MACHINE) for start in run.starts} for run in (a, b)]
    for index, key in enumerate(MACHINE):
        ours, theirs = (sorted({values[index] for values in machine}) for machine in machines)
        if ours != theirs and not _is_declared(f"machine.{key}", declared):
            yield f"machine.{key} is {', '.join(ours)} in A and {', '.join(theirs)} in B"


def _pair(a: PointRecord, b: PointRecord, swept: Collection[str], *, may_pair: bool) -> Pair:
    """A pair, named by what both set where both are the same point of a sweep.

    Requests of a load that is told by a capacity come at another rate in each run.
    """
    common = {key: a.settings.get(key) for key in sorted(swept)}
    keys = [key for key in {*a.settings, *b.settings} - WHEREABOUTS if key.startswith("workload.")]
    is_same = all(a.settings.get(key) == b.settings.get(key) for key in keys)
    may_pair &= a.settings.get("workload.kind") != "relative"
    return Pair(label=label(common), a=a, b=b, is_paired=is_same and may_pair)


def models_differ(a: Mapping[str, object], b: Mapping[str, object], declared: Collection[str]) -> list[str]:
    """How the models differ by what the servers reported; a path alone says nothing about the weights.

    A declared key of `server.model` stands for what it decides: the path for all of it, any other for its namesake.
    """
    if {"server", "server.model", "server.model.path"} & set(declared):
        return []
    declared = [*declared, *(key.removeprefix("server.") for key in declared)]
    return [
        f"model.{key} is {a[key]!r} in A and {b[key]!r} in B"
        for key in MODEL
        if a[key] != b[key] and not _is_declared(f"model.{key}", declared)
    ]
