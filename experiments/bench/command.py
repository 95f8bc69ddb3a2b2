"""`moonshard bench`: latency and throughput of the device side and the whole stack, beside Hugging Face transformers.

A benchmark and not a test: it asserts nothing. The parts of a round take turns, so that what else happens on the
machine hits all of them, and the servers that a round loads are idle while the others run. What needs a deployment of
its own (handoffs, meshes, arrangements, failover) comes afterwards, one part at a time.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import msgspec
import tyro
from rich.console import Console
from rich.markup import escape

from moonshard.experiments.bench.costs.gateway_cost import measure_gateway
from moonshard.experiments.bench.costs.recording_cost import measure_recording
from moonshard.experiments.bench.costs.routing import measure_routing
from moonshard.experiments.bench.costs.token_cost import measure_tokens
from moonshard.experiments.bench.formats.measure import measure_formats
from moonshard.experiments.bench.meshes.measure import measure_meshes
from moonshard.experiments.bench.peers import proportions
from moonshard.experiments.bench.peers.beside import HUGGING_FACE, OURS, measure_beside
from moonshard.experiments.bench.peers.completions import Peer, parse_peers
from moonshard.experiments.bench.peers.peer import peers_of, run_peer
from moonshard.experiments.bench.profile.measure import measure_profile
from moonshard.experiments.bench.report import Report, footnotes, markdown, tables, to_json
from moonshard.experiments.bench.serving.arrangements import measure_arrangements
from moonshard.experiments.bench.serving.constrained import measure_constrained
from moonshard.experiments.bench.serving.failover import measure_failover
from moonshard.experiments.bench.serving.handoff import measure_handoffs
from moonshard.experiments.bench.serving.served import measure_after, measure_served
from moonshard.experiments.bench.serving.speculation import measure_speculation
from moonshard.experiments.bench.serving.starts import measure_cold, measure_start, with_cache
from moonshard.experiments.bench.sizes.measure import measure_sizes
from moonshard.experiments.bench.steps.device import Job, Part
from moonshard.experiments.bench.tiers.measure import measure_tiers
from moonshard.experiments.bench.transfer.transport_rows import measure_publishes
from moonshard.experiments.common.machine import describe_commit, describe_machine, describe_versions
from moonshard.experiments.common.running.measurement import QUICK, Measurement, Plan, merge
from moonshard.experiments.common.running.own_process import ask
from moonshard.experiments.common.running.server import (
    HANDED_OVER,
    NOBODY_REFUSED,
    RunningServer,
    ServerFailed,
    serving,
)
from moonshard.experiments.common.trace_file import TracedRequest, read_trace
from moonshard.kv.transfer import TransportUnavailable
from moonshard.models.folder.checkpoint import CheckpointError
from moonshard.models.spec import ModelError
from moonshard.serving.commands.options import Overrides
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides, leaves, load_config

Whole = Literal["served", "disaggregated"]  # the whole stack, aggregated or not
Apart = Literal[
    "transports",
    "handoff",
    "meshes",
    "routing",
    "gateway",
    "recording",
    "arrangements",
    "failover",
    "constrained",
    "speculation",
]  # each with processes of its own
Real = Literal[
    "peers", "profile", "formats", "sizes", "tiers"
]  # of a checkpoint with a real model's proportions, where none is named
Section = Part | Whole | Apart | Real | Literal["start", "huggingface"]
Mode = Literal["aggregated", "disaggregated"]
PeerUrls = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=URL")]
MODES: Mapping[Whole, Mode] = {"served": "aggregated", "disaggregated": "disaggregated"}
SERVED: tuple[Whole, ...] = ("served", "disaggregated")
APART: tuple[Apart, ...] = (
    *("transports", "handoff", "meshes", "routing", "gateway", "recording", "arrangements", "failover"),
    *("constrained", "speculation"),
)
FAULTS = (ServerFailed, TransportUnavailable, CheckpointError, ModelError, OSError, subprocess.CalledProcessError)
PIPED_WIDTH = 170  # characters; a terminal has its own
DEVICE_PARTS: tuple[Part, ...] = ("steps", "engine", "kv")
REAL: tuple[Real, ...] = ("peers", "profile", "formats", "sizes", "tiers")
SECTIONS: tuple[Section, ...] = (*DEVICE_PARTS, "start", *SERVED, "huggingface", *APART, *REAL)
PROPORTIONS = Path("results/bench/k2_proportions")  # the checkpoint of these parts, written where it is not there yet
CONVERTED = "converted"  # beside what is written: the checkpoint in other number formats


def bench(
    model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results/bench"),
    quick: bool = False,
    only: Annotated[str, tyro.conf.arg(metavar="PART,...")] = "",
    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    peer: PeerUrls = (),
    set: Overrides = (),
) -> int:
    """Measure latency and throughput, and print them beside Hugging Face transformers.

    Args:
        model: a checkpoint folder; without one the embedded model, and for peers, profile, formats, sizes and tiers one
            with Kimi K2's proportions, which is written first.
        out: where the JSON goes, and the tables as Markdown.
        quick: one round with few starts; a minute or two.
        only: measure only these parts: steps, engine, kv, start, served, disaggregated, huggingface, transports,
            handoff, meshes, routing, gateway, recording, arrangements, failover, constrained, speculation, peers,
            profile, formats, sizes, tiers.
        trace: for routing: what to replay, in Mooncake's format; without one sessions of agents that are made up.
        peer: for peers: another OpenAI-compatible server that runs already and serves the same checkpoint, with the
            name of its column. May be repeated.
        set: a key of the server's configuration, as for `moonshard serve`. May be repeated.
    """
    try:
        sections = sections_of(only)
        requests = None if trace is None else read_trace(trace)
        peers = parse_peers(peer, taken=(*OURS, HUGGING_FACE))
        if peers and "peers" not in sections:
            raise ValueError("--peer: only the part peers asks them, and --only does not name it")
        real = model or (proportions.once(PROPORTIONS) if any(section in REAL for section in sections) else None)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"moonshard bench: {error}\n")
        return 2
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    try:
        plan = QUICK if quick else Plan()
        report = run_bench(_config(set, model), plan, sections, os.environ, console, requests)
        report = _with_real(report, _config(set, real), sections, peers, console, out / CONVERTED)
    except FAULTS as error:
        sys.stderr.write(f"moonshard bench: {error}\n")
        return 1
    for table in tables(report):
        console.print(table)
    for note in footnotes(report):
        console.print(note, soft_wrap=True)
    console.print(f"written: {write(report, out)}", soft_wrap=True)
    return 0


def _config(overrides: Sequence[str], model: Path | None) -> Config:
    named = () if model is None else (f"model.path={model.resolve()}",)
    return load_config(None, (HANDED_OVER, NOBODY_REFUSED, *overrides, *named))


def _say(console: Console, text: str) -> None:
    console.print(f"[dim]{escape(text)}[/dim]", highlight=False)


def sections_of(only: str) -> tuple[Section, ...]:
    """The named parts in the order in which they run; an empty string means all. ValueError for an unknown one."""
    asked = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in SECTIONS]:
        raise ValueError(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return tuple(section for section in SECTIONS if section in asked) if asked else SECTIONS


def run_bench(
    config: Config,
    plan: Plan,
    sections: Sequence[Section],
    environment: Mapping[str, str],
    console: Console,
    trace: Sequence[TracedRequest] | None = None,
) -> Report:
    """Raises ServerFailed, TransportUnavailable, or CalledProcessError of the device's or Hugging Face's process."""
    begun_s, machine = time.perf_counter(), describe_machine()
    with TemporaryDirectory() as cache:
        measured = replace(config, worker=replace(config.worker, prepare="all"))  # each step in a program of its size
        run = _BenchRun(measured, plan, sections, with_cache(environment, Path(cache)), console, trace)
        run.measure()
    return Report(
        stamp=datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ"),
        commit=describe_commit(),
        machine=machine,
        versions=describe_versions(),
        config={key: str(value) for key, value in leaves(config)},
        plan=plan,
        measurements=merge(run.found),
        peers=peers_of(run.peer_reports, plan),
        peer_engine=str(run.peer_reports[0]["engine"]) if run.peer_reports else None,
        peer_reports=run.peer_reports,
        elapsed_s=time.perf_counter() - begun_s,
    )


def _with_real(
    report: Report,
    config: Config,
    sections: Sequence[Section],
    peers: Sequence[Peer],
    console: Console,
    converted: Path,
) -> Report:
    """The report with the parts of `REAL`, as far as they were asked for. Raises as `run_bench`."""
    begun_s, measured = time.perf_counter(), replace(config, worker=replace(config.worker, prepare="all"))
    if "peers" in sections:
        beside = measure_beside(measured, peers, report.plan, os.environ, partial(_say, console))
        report = replace(report, beside=beside)
    if "profile" in sections:
        _say(console, "profile")
        report = replace(report, profile=measure_profile(measured, report.plan, os.environ))
    if "formats" in sections:
        _say(console, "formats")
        report = replace(report, formats=measure_formats(measured, report.plan, os.environ, converted))
    if "sizes" in sections:
        _say(console, "sizes")
        report = replace(report, sizes=measure_sizes(measured, report.plan, os.environ))
    if "tiers" in sections:
        _say(console, "tiers")
        report = replace(report, tiers=measure_tiers(measured, report.plan, os.environ, converted.parent))
    return replace(report, elapsed_s=report.elapsed_s + time.perf_counter() - begun_s)


@dataclass(slots=True)
class _BenchRun:
    """What has been measured so far. The compile cache is the run's own, so it is empty at the first start."""

    config: Config
    plan: Plan
    sections: Sequence[Section]
    environment: Mapping[str, str]
    console: Console
    trace: Sequence[TracedRequest] | None
    found: list[Measurement] = field(default_factory=list)
    peer_reports: list[dict] = field(default_factory=list)

    def measure(self) -> None:
        if "start" in self.sections:
            self._starts()
        if {*DEVICE_PARTS, *SERVED, "huggingface"}.intersection(self.sections):
            with ExitStack() as stack:
                servers: dict[Whole, RunningServer] = {
                    level: self._serve(stack, level) for level in SERVED if level in self.sections
                }
                self._rounds(servers)
                for level, server in servers.items():
                    self.found += measure_after(server, level)
        for section in APART:
            if section in self.sections:
                self._say(section)
                self.found += self._apart(section)

    def _serve(self, stack: ExitStack, level: Whole) -> RunningServer:
        self._say(f"starting the whole stack, {level}")
        return stack.enter_context(serving(as_overrides(self._served_config(MODES[level])), self.environment))

    def _apart(self, section: Apart) -> list[Measurement]:
        match section:
            case "transports":
                return measure_publishes(self.plan)
            case "handoff":
                with serving(as_overrides(self._served_config("disaggregated")), self.environment) as server:
                    return measure_handoffs(server, self.plan)
            case "meshes":
                return measure_meshes(self.config, self.plan, self.environment)
            case "routing":
                return measure_routing(self.plan, self.trace)
            case "gateway":
                found = measure_gateway(self.config, self.plan, self.environment)
                return found + measure_tokens(self.config, self.plan, self.environment)
            case "recording":
                return measure_recording(self._served_config("aggregated"), self.plan, self.environment)
            case "arrangements":
                return measure_arrangements(self.config, self.plan, self.environment)
            case "constrained":
                return measure_constrained(self.config, self.plan, self.environment)
            case "speculation":
                return measure_speculation(self.config, self.plan, self.environment)
            case _:
                return measure_failover(self.config, self.plan, self.environment)

    def _starts(self) -> None:
        overrides = [*as_overrides(self._served_config("aggregated")), "worker.prepare=needed"]  # as users start it
        for index in range(1, self.plan.cold_starts):
            self._say(f"cold start {index} of {self.plan.cold_starts}")
            self.found += measure_cold(overrides, self.environment)
        self._say(f"cold start {self.plan.cold_starts} of {self.plan.cold_starts}")
        self._start(overrides, "cold")  # the first use of this run's cache fills it
        for index in range(1, self.plan.warm_starts + 1):
            self._say(f"warm start {index} of {self.plan.warm_starts}")
            self._start(overrides, "warm")

    def _start(self, overrides: Sequence[str], cache: str) -> None:
        with serving(overrides, self.environment) as server:
            self.found += measure_start(server, cache)

    def _rounds(self, servers: Mapping[Whole, RunningServer]) -> None:
        for index in range(self.plan.rounds):
            where = f"round {index + 1} of {self.plan.rounds}"
            for level, server in servers.items():
                self._say(f"{where}: whole stack, {MODES[level]}")
                self.found += asyncio.run(measure_served(server, self.plan, index, level))
            parts: tuple[Part, ...] = tuple(part for part in DEVICE_PARTS if part in self.sections)
            if parts:
                self._say(f"{where}: device level")
                self.found += self._device(parts, index)
            if "huggingface" in self.sections:
                self._say(f"{where}: Hugging Face")
                report = run_peer(self.config.model.path, self.plan)
                self.peer_reports += [report] if report else []

    def _device(self, parts: tuple[Part, ...], seed: int) -> list[Measurement]:
        job = Job(overrides=tuple(as_overrides(self.config)), plan=self.plan, parts=parts, seed=seed)
        return ask("experiments.bench.steps.device", job, list[Measurement], self.environment)

    def _served_config(self, mode: Mode) -> Config:
        return replace(self.config, mode=mode, gateway=replace(self.config.gateway, port=0, grpc_port=0))

    def _say(self, text: str) -> None:
        _say(self.console, text)


def write(report: Report, folder: Path) -> Path:
    """Writes the report as JSON, and the tables as Markdown beside it. Returns the JSON's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.stamp}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(to_json(report)), indent=1) + b"\n")
    notes = "\n".join(f"- {note}" for note in footnotes(report))
    path.with_suffix(".md").write_text(f"{markdown(report)}\n\n{notes}\n")
    return path
