"""The points of a sweep, each checked and with all of its configuration: what swept and listed keys make of the rest.

A point may set any key of `[server]`, `[workload]` and `[client]`, and `cores`. Faults are collected, not raised.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from moonshard.experiments.common.fields import ExperimentError, read_fields, unknown_key
from moonshard.experiments.common.flat import Flat, below, flatten, unflatten
from moonshard.experiments.runner.sweep import expand, label
from moonshard.experiments.workload.options import (
    KINDS,
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
from moonshard.serving.config.keys import Config, ConfigError
from moonshard.serving.config.reading import all_keys, config_of, leaves

POINT_TABLES = ("server.", "workload.", "client.")  # whose keys a point may set


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
    """The keys outside all tables."""

    repeats: Annotated[int, Meta(ge=1, le=1000)] = 1
    warmup_requests: Annotated[int, Meta(ge=0)] = 4  # before each trial, with prompts of their own
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()  # one for each worker, prefill first; empty: the system's choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point of the sweep. `settings` has every key with its value, also where that is a default."""

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
        """The server's context; None where only the running server knows it."""
        return self.server.model.max_context_tokens if self.server else None


def is_of_points(key: str) -> bool:
    return key == "cores" or key.startswith(POINT_TABLES)


def misplaced(sweep: Collection[str], listed: Sequence[Flat], url: str | None) -> list[str]:
    """Faults of the keys that points set: unknown keys, and keys that a running server cannot follow."""
    places = {f"points.{key}": key for point in listed for key in point} | {f"sweep.{key}": key for key in sweep}
    known = _point_keys()
    faults = [_unknown(place, key, known) for place, key in sorted(places.items()) if key not in known]
    if url is not None:
        own = sorted(key for key in set(places.values()) if key == "cores" or key.startswith("server."))
        faults += [f"--url: a server that runs already does not follow {key}" for key in own]
    return faults


def _point_keys() -> frozenset[str]:
    """The keys that a point may set; of a workload, the keys of every kind."""
    kinds = [("client", ClientOptions), *(("workload", kind) for kind in KINDS.values())]
    own = {f"{table}.{one.name}" for table, kind in kinds for one in fields(kind)}
    return frozenset({"cores", *own, *(f"server.{key}" for key in all_keys())})


def _unknown(place: str, key: str, known: Collection[str]) -> str:
    """What to say of an unknown key. `place` is where it was found, and ends with it."""
    if not is_of_points(key):
        fits = "points set keys of server and workload, such as server.decode.max_slots, of client, and cores"
        return f"{place}: {fits}"
    table, _, name = key.partition(".")
    return place.removesuffix(name) + unknown_key(name, sorted(below(dict.fromkeys(known), table)))


def make_points(
    base: Flat,
    sweep: Mapping[str, Sequence[object]],
    listed: Sequence[Flat],
    shared: Mapping[str, object],
    url: str | None,
    faults: list[str],
) -> list[Point]:
    """The points that could be made. Unknown swept keys are dropped: `misplaced` has reported them."""
    try:
        expanded = expand(sweep, listed)
    except ValueError as error:
        faults.append(str(error))
        return []
    known = _point_keys()
    told = [base | {key: value for key, value in swept.items() if key in known} for swept in expanded]
    found = [
        _point(number, swept, given, shared, url, faults)
        for number, (swept, given) in enumerate(zip(expanded, told, strict=True))
    ]
    for options, max_context_tokens in dict.fromkeys(map(_workload_of, told, found)):
        try:
            if options is not None:
                check_workload(options, max_context_tokens)
        except ExperimentError as error:
            faults += error.faults
    return [point for point in found if point is not None]


def _workload_of(given: Flat, point: Point | None) -> tuple[WorkloadOptions | None, int | None]:
    """The point's workload, with the context that it has to fit into where the point could be made."""
    if point is not None:
        return point.workload, point.max_context_tokens
    return read_workload(below(given, "workload"), []), None


def cache_faults(points: Sequence[Point], repeats: int, url: str | None) -> list[str]:
    """Faults of prompts that repeat on a server that keeps its cache: later trials would find them again."""
    is_repeated = len(points) * repeats > 1 and any(isinstance(point.workload, PromptOptions) for point in points)
    if url is None or not is_repeated:
        return []
    return [
        "--url: the server keeps its cache, in which the prompts of a file are found again by every trial but the "
        "first; ask for one point and repeats=1"
    ]


def capacity_faults(points: Sequence[Point]) -> list[str]:
    """Faults of loads that are relative to a capacity and have no closed loop before them to measure it."""
    if not any(isinstance(point.workload, RelativeOptions) for point in points):
        return []
    first = points[0]
    if isinstance(first.workload, FixedOptions) and first.workload.rate_per_s is None:
        return []
    return [
        f"workload.kind relative: loads are told by what the first point gets done; {first.label} has to be of kind "
        "fixed, with workload.num_clients and without workload.rate_per_s"
    ]


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
    # unless it is asked otherwise, no step that is measured runs in a larger program than its own, and no request is
    # refused for its wait: what a load does to those who are served is to show
    server = {"worker.prepare": "all", "routing.ttft_slo_s": "none", **below(given, "server")}
    try:
        return config_of(unflatten(server))
    except ConfigError as error:
        faults += [f"[server] {fault}" for fault in error.faults]
    except ValueError as error:
        faults.append(f"[server] {error}")
    return None


def _plain(value: object) -> object:
    """The value in the form that JSON has."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
