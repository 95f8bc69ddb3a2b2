"""An experiment's config.toml with what the command line says on top: checked, and expanded to points.

Every fault is named at once, with its key. What points are made of is `points`'.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moonshard.experiments.common.fields import ExperimentError, read_fields, unknown_key
from moonshard.experiments.common.flat import Flat, below, flatten, overridden
from moonshard.experiments.common.slo import Slo
from moonshard.experiments.runner.points import (
    ClientOptions,
    Point,
    RunOptions,
    cache_faults,
    capacity_faults,
    is_of_points,
    make_points,
    misplaced,
)
from moonshard.serving.config.reading import path_keys

TABLES = ("server", "workload", "slo", "client", "sweep", "points")
_PATHS = {"workload.path", *(f"server.{key}" for key in path_keys())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    name: str
    options: RunOptions
    slo: Slo
    points: Sequence[Point]
    url: str | None = None  # of the gRPC service of a server that runs already
    api_key: str | None = field(default=None, repr=False)  # what that knows us by; in no record
    given: Flat = field(default_factory=dict)  # what file and command line say


def load_experiment(folder: Path, overrides: Sequence[str] = (), url: str | None = None) -> Experiment:
    """The experiment of a folder and a command line. ExperimentError naming every fault."""
    faults: list[str] = []
    try:
        given = overridden(_read(folder / "config.toml"), overrides)
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    listed = _listed(given.pop("points", []), faults)
    sweep = _sweep(given, faults)
    faults += _table_faults(given)
    top = {key: value for key, value in given.items() if "." not in key and key not in TABLES}
    options = read_fields(RunOptions, top, "", faults)
    client = read_fields(ClientOptions, below(given, "client"), "client", faults)
    slo = read_fields(Slo, below(given, "slo"), "slo", faults)
    faults += misplaced(sweep, listed, url)
    faults += [
        f"--set {text}: the sweep has it; set sweep.{text.partition('=')[0]}=[...]"
        for text in overrides
        if text.partition("=")[0].strip() in sweep
    ]
    base = {key: value for key, value in given.items() if is_of_points(key)}
    shared = {"slo": asdict(slo or Slo()), "warmup_requests": (options or RunOptions()).warmup_requests}
    points = make_points(base, sweep, listed, shared, url, faults)
    faults += cache_faults(points, 1 if options is None else options.repeats, url)
    faults += capacity_faults(points)
    if faults or options is None or client is None or slo is None:
        raise ExperimentError(*dict.fromkeys(faults))
    if listed:
        given["points"] = listed
    return Experiment(name=folder.resolve().name, options=options, slo=slo, points=points, url=url, given=given)


def _read(path: Path) -> Flat:
    """The file's keys, with paths made whole: a relative one is relative to the file."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML: the message names the place
        raise ExperimentError(f"{path}: {error}") from error
    flat = flatten(tree)
    if isinstance(points := flat.get("points"), list):
        flat["points"] = [_beside(path.parent, flatten(p)) if isinstance(p, dict) else p for p in points]
    return _beside(path.parent, flat)


def _beside(folder: Path, flat: Flat) -> Flat:
    return {
        key: _whole(folder, value) if key.removeprefix("sweep.") in _PATHS else value for key, value in flat.items()
    }


def _whole(folder: Path, value: object) -> object:
    if isinstance(value, list):
        return [_whole(folder, one) for one in value]
    return str((folder / Path(value).expanduser()).resolve()) if isinstance(value, str) and value else value


def _listed(points: object, faults: list[str]) -> list[Flat]:
    if isinstance(points, list) and all(isinstance(point, dict) for point in points):
        return [flatten(point) for point in points]
    faults.append("points: expected tables, each [[points]]")
    return []


def _sweep(given: Flat, faults: list[str]) -> Mapping[str, list[object]]:
    """The values of each swept key."""
    found: dict[str, list[object]] = {}
    for key, values in below(given, "sweep").items():
        if isinstance(values, list):
            found[key] = values
        else:
            faults.append(f"sweep.{key}: expected a list of values")
    return found


def _table_faults(given: Flat) -> list[str]:
    tables = {key.partition(".")[0] for key in given if "." in key}
    faults = [unknown_key(table, TABLES) for table in sorted(tables.difference(TABLES))]
    return faults + [f"{key}: expected a table" for key in given if key in TABLES]
