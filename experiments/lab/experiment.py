"""An experiment's config.toml with what the command line says on top: checked, and expanded to points.

Every fault is named at once, with its key. A point may set any key of `[server]`, `[workload]` and `[client]`, and
`cores`.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from moonshard.experiments.lab.fields import ExperimentError, read_fields, unknown_key
from moonshard.experiments.lab.flat import Flat, below, flatten, overridden, unflatten
from moonshard.experiments.lab.slo import Slo
from moonshard.experiments.lab.sweep import expand, label
from moonshard.experiments.workload.options import (
    FixedOptions,
    PromptOptions,
    RelativeOptions,
    WorkloadOptions,
    check_workload,
    digest_of,
    read_workload,
    settings_of,
)
from moonshard.serving.commands.serve import ChildCommands
from moonshard.serving.config import Config, ConfigError
from moonshard.serving.config_file import all_keys, config_of, leaves, path_keys

TABLES = ("server", "workload", "slo", "client", "sweep", "points")
POINT_TABLES = ("server.", "workload.", "client.")  # whose keys a point may set
_PATHS = {"workload.path", *(f"server.{key}" for key in path_keys())}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """What each request asks for, and what of it is kept."""

    temperature: Annotated[float, Meta(ge=0)] = 0.0
    ignore_eos: bool = True  # so that outputs are as long as the workload says
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    names_sessions: bool = False  # by the header x-session-affinity
    tokens: bool = True  # a row for each token
    late_ms: Annotated[float, Meta(gt=0)] = 5.0  # a request sent later than this after its time counts as late


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The keys above all tables."""

    repeats: Annotated[int, Meta(ge=1, le=1000)] = 1
    warmup_requests: Annotated[int, Meta(ge=0)] = 4  # before each trial, with prompts of their own
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()  # one for each worker, prefill first; empty: the system's choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point of the sweep. `settings` is every key of it with its value, also those that nobody has set."""

    number: int
    swept: Flat
    settings: Flat
    cores: tuple[int, ...]
    client: ClientOptions
    server: Config | None  # None: a server that runs already
    workload: WorkloadOptions

    @property
    def label(self) -> str:
        return label(self.swept)

    @property
    def max_context_tokens(self) -> int | None:
        """None: only the server knows."""
        return self.server.model.max_context_tokens if self.server else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    name: str
    options: RunOptions
    slo: Slo
    points: Sequence[Point]
    url: str | None = None  # of the gRPC service of a server that runs already
    given: Flat = field(default_factory=dict)  # what file and command line say


def load_experiment(folder: Path, overrides: Sequence[str] = (), url: str | None = None) -> Experiment:
    """ExperimentError naming every fault."""
    faults: list[str] = []
    try:
        given = overridden(_read(folder / "config.toml"), overrides)
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    listed = _listed(given.pop("points", []), faults)
    sweep = below(given, "sweep")
    faults += [
        f"sweep.{key}: expected a list of values" for key, values in sweep.items() if not isinstance(values, list)
    ]
    top = {key: value for key, value in given.items() if "." not in key}
    tables = {key.partition(".")[0] for key in given if "." in key}
    faults += [unknown_key(table, TABLES) for table in sorted(tables.difference(TABLES))]
    faults += [f"{key}: expected a table" for key in top if key in TABLES]
    options = read_fields(RunOptions, {k: v for k, v in top.items() if k not in TABLES}, "", faults)
    client = read_fields(ClientOptions, below(given, "client"), "client", faults)
    slo = read_fields(Slo, below(given, "slo"), "slo", faults)
    faults += _misplaced({key for point in (sweep, *listed) for key in point}, url)
    faults += [
        f"--set {text}: the sweep has it; set sweep.{text.partition('=')[0]}=[...]"
        for text in overrides
        if text.partition("=")[0].strip() in sweep
    ]
    if faults or options is None or client is None or slo is None:
        raise ExperimentError(*faults)
    base = {key: value for key, value in given.items() if key == "cores" or key.startswith(POINT_TABLES)}
    shared = {"slo": asdict(slo), "warmup_requests": options.warmup_requests}
    points = _points(base, sweep, listed, shared, url)
    _check_cache_finds_nothing(points, options.repeats, url)
    _check_capacity_is_measured(points)
    if listed:
        given["points"] = listed
    return Experiment(name=folder.resolve().name, options=options, slo=slo, points=points, url=url, given=given)


def _read(path: Path) -> Flat:
    """The file's keys, with whole paths: a relative one is beside the file."""
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


def _misplaced(keys: set[str], url: str | None) -> list[str]:
    """Faults of the keys that points set: those that none can set, and those that a running server does not follow."""
    faults = [
        f"sweep.{key}: points set keys of server and workload, such as server.decode.max_slots, of client, and cores"
        for key in sorted(keys)
        if key != "cores" and not key.startswith(POINT_TABLES)
    ]
    if url is not None:
        own = sorted(key for key in keys if key == "cores" or key.startswith("server."))
        faults += [f"--url: a server that runs already does not follow {key}" for key in own]
    return faults


def _points(
    base: Flat, sweep: Flat, listed: Sequence[Flat], shared: Mapping[str, object], url: str | None
) -> list[Point]:
    try:
        expanded = expand(sweep, listed)  # pyright: ignore[reportArgumentType]  # its values are lists, as was checked
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    faults: list[str] = []
    found = [_point(number, swept, base | swept, shared, url, faults) for number, swept in enumerate(expanded)]
    points = [point for point in found if point is not None]
    if faults:
        raise ExperimentError(*dict.fromkeys(faults))
    for options, max_context_tokens in {(p.workload, p.max_context_tokens): None for p in points}:
        check_workload(options, max_context_tokens)
    return points


def _check_cache_finds_nothing(points: Sequence[Point], repeats: int, url: str | None) -> None:
    """A server that runs already keeps its cache, and real prompts are the same every time."""
    is_repeated = len(points) * repeats > 1 and any(isinstance(point.workload, PromptOptions) for point in points)
    if url is not None and is_repeated:
        raise ExperimentError(
            "--url: the server keeps its cache, in which the prompts of a file are found again by every trial but the "
            "first; ask for one point and repeats=1"
        )


def _check_capacity_is_measured(points: Sequence[Point]) -> None:
    """Loads that are told by a capacity need a closed loop before them."""
    first = points[0].workload
    is_closed = isinstance(first, FixedOptions) and first.rate_per_s is None
    if not is_closed and any(isinstance(point.workload, RelativeOptions) for point in points):
        raise ExperimentError(
            f"workload.kind relative: loads are told by what the first point gets done; {points[0].label} has to be of "
            "kind fixed, with workload.num_clients and without workload.rate_per_s"
        )


def _point(
    number: int, swept: Flat, given: Flat, shared: Mapping[str, object], url: str | None, faults: list[str]
) -> Point | None:
    num_before = len(faults)
    workload = read_workload(below(given, "workload"), faults)
    client = read_fields(ClientOptions, below(given, "client"), "client", faults)
    own = read_fields(RunOptions, {"cores": given.get("cores", ())}, "", faults)
    server = _server(given, faults) if url is None else None
    if url is not None:
        known = all_keys()
        faults += [f"[server] {unknown_key(key, known)}" for key in below(given, "server") if key not in known]
    if "server.trace.path" in given:
        faults.append("server.trace.path: each trial records into its own folder")
    if own is not None and server is not None and own.cores:
        faults += _core_faults(own.cores, num_workers=len(ChildCommands(server).workers))
    if len(faults) > num_before or workload is None or client is None or own is None:
        return None
    settings = flatten(
        {**shared, "client": asdict(client), "workload": {**settings_of(workload), **digest_of(workload)}}
    )
    if server is not None:
        told = {key: _plain(value) for key, value in leaves(server) if key != "trace.path"}
        settings |= {"cores": list(own.cores)} | {f"server.{key}": value for key, value in told.items()}
    return Point(
        number=number,
        swept=swept,
        settings=settings,
        cores=own.cores,
        client=client,
        server=server,
        workload=workload,
    )


def _core_faults(cores: Sequence[int], num_workers: int) -> list[str]:
    usable = sorted(os.sched_getaffinity(0))
    faults = [f"cores: {core} is none of this process's cores: {usable}" for core in cores if core not in usable]
    return faults + ([f"cores: {len(cores)} for {num_workers} workers"] if len(cores) != num_workers else [])


def _server(given: Flat, faults: list[str]) -> Config | None:
    try:
        return config_of(unflatten(below(given, "server")))
    except ConfigError as error:
        faults += [f"[server] {fault}" for fault in error.faults]
    except ValueError as error:
        faults.append(f"[server] {error}")
    return None


def _plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
