"""Ours and other servers beside each other on one checkpoint: started, measured in turns, and held against the machine.

Ours are started here: aggregated, once with weights as the configuration has them and once in float32, and
disaggregated. A peer is a URL, which somebody else has started and stops. Hugging Face is no server: where its
environment is installed, its script runs after them. The machine's own rates are measured first, when nothing else
runs.
"""

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import randbits
from tempfile import TemporaryDirectory

from moonshard.experiments.bench.floors.ceilings import measure_in_process
from moonshard.experiments.bench.floors.work import Ceilings, ItemBytes, Work
from moonshard.experiments.bench.peers.compare import Comparison, Contender, Effort, Figure, Say, compare
from moonshard.experiments.bench.peers.completions import Peer
from moonshard.experiments.bench.peers.peer import run_peer
from moonshard.experiments.bench.peers.rows import Decoding, Prefilling, Row, rows_of
from moonshard.experiments.bench.peers.watch import listeners, tree
from moonshard.experiments.bench.serving.starts import measure_first_token_s, with_cache
from moonshard.experiments.common.running.measurement import Plan
from moonshard.experiments.common.running.server import RunningServer, peak_memory_mib, serving
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides

AGGREGATED, IN_FLOAT32, APART = "moonshard", "moonshard, float32", "moonshard, apart"
OURS = (AGGREGATED, IN_FLOAT32, APART)  # their names in the table
HUGGING_FACE = "Hugging Face"
EMPTY, FULL = "start to first token, caches empty", "start to first token, caches full"
MEMORY, WORKER_MEMORY = "peak memory", "peak memory of a worker beyond a bare one"
AT_START = "a worker's memory beyond a bare one at its first token, caches {}"
MODULES = ", ".join(f"moonshard.serving.worker.{name}" for name in ("process", "loaded"))  # a worker's
BARE_WORKER = f"import jax, {MODULES}; jax.devices(); print(open('/proc/self/status').read())"


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """What our workers cannot do without."""

    work: Mapping[str, Work]  # by row; empty for a model without latent attention
    item_bytes: ItemBytes
    weights_mib: float
    pool_mib: float  # of KV, as configured


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """The table beside peers, before it is laid out."""

    rows: Sequence[Row]
    comparison: Comparison
    ceilings: Ceilings
    folder: Path
    least: Mapping[str, Least]  # by name of an aggregated server of ours


def measure_beside(
    config: Config, peers: Sequence[Peer], plan: Plan, environment: Mapping[str, str], say: Say
) -> Beside:
    """Measures all of it. ServerFailed where ours does not start; peers that do not answer have a note."""
    say("the machine's own rates")
    ceilings = measure_in_process(environment)
    folder, rows, configs = config.model.path, rows_of(plan), configs_of(config)
    bare_mib = _bare_worker_mib(environment)
    started = _starts(config, plan, environment, bare_mib, say)
    with ExitStack() as stack, TemporaryDirectory() as cache:
        ours: dict[str, RunningServer] = {}
        for name, own in configs.items():
            say(f"starting {name}, once to fill its cache of programs: compiling leaves a higher peak of memory")
            with serving(as_overrides(own), with_cache(environment, Path(cache))):
                pass
            ours[name] = stack.enter_context(serving(as_overrides(own), with_cache(environment, Path(cache))))
        contenders = [
            *(
                Contender(peer=Peer(name=name, url=one.http), pids=tuple(one.pids.values()))
                for name, one in ours.items()
            ),
            *(Contender(peer=peer) for peer in peers),
        ]
        effort = Effort(samples=plan.compared_samples, tries=plan.compared_tries)
        comparison = asyncio.run(compare(contenders, rows, folder, effort, say, seed=randbits(32)))
        comparison.figures |= {(name, AGGREGATED): figure for name, figure in started.items()}
        comparison.figures |= _memory(ours, peers, bare_mib)
    say(HUGGING_FACE)
    _add_hugging_face(comparison, rows, run_peer(folder, plan))
    least = {name: least_of(own, rows) for name, own in configs.items() if own.mode == "aggregated"}
    return Beside(rows=rows, comparison=comparison, ceilings=ceilings, folder=folder, least=least)


def configs_of(config: Config) -> dict[str, Config]:
    """Our servers by name. Where the configuration says how weights lie, there is none in float32 beside it."""
    own = replace(config, mode="aggregated", gateway=replace(config.gateway, port=0, grpc_port=0))
    found = {AGGREGATED: own}
    if config.model.weights == "native":
        found[IN_FLOAT32] = replace(own, model=replace(config.model, weights="float32"))
    return {**found, APART: replace(own, mode="disaggregated")}


def least_of(config: Config, rows: Sequence[Row]) -> Least:
    from moonshard.experiments.bench.floors import asked  # imports jax: after all is measured
    from moonshard.models.model import LatentModel
    from moonshard.models.registry import open_model

    size = asked.item_bytes(config)
    _, model = open_model(config.model.path)
    works = {row.name: asked.row_work(model, row, size) for row in rows} if isinstance(model, LatentModel) else {}
    weights_mib, pool_mib = (num_bytes / 2**20 for num_bytes in asked.held_bytes(config, model, size))
    return Least(work=works, item_bytes=size, weights_mib=weights_mib, pool_mib=pool_mib)


def _starts(config: Config, plan: Plan, environment: Mapping[str, str], bare_mib: float, say: Say) -> dict[str, Figure]:
    """Of an aggregated server as a user starts it: seconds from its execution to its first token, its memory then."""
    overrides = [*as_overrides(configs_of(config)[AGGREGATED]), "worker.prepare=needed"]
    found: dict[str, list[float]] = {EMPTY: [], FULL: []}
    peaks: dict[str, list[float]] = {EMPTY: [], FULL: []}
    for index in range(plan.compared_starts):
        with TemporaryDirectory() as cache:
            for name, seconds in found.items():  # the first fills the cache of the second
                say(f"{name}: {index + 1} of {plan.compared_starts}")
                with serving(overrides, with_cache(environment, Path(cache))) as server:
                    seconds.append(measure_first_token_s(server))
                    peaks[name].append(_worker_mib(server) - bare_mib)
    caches = {EMPTY: "empty", FULL: "full"}
    return {
        **{name: Figure(unit="s", values=tuple(seconds)) for name, seconds in found.items()},
        **{AT_START.format(caches[name]): Figure(unit="MiB", values=tuple(mib)) for name, mib in peaks.items()},
    }


def _worker_mib(server: RunningServer) -> float:
    """The high-water mark of its largest worker."""
    return max(peak_memory_mib(pid) or 0.0 for role, pid in server.pids.items() if role != "gateway")


def _memory(ours: Mapping[str, RunningServer], peers: Sequence[Peer], bare_mib: float) -> dict[tuple[str, str], Figure]:
    """High-water marks of resident memory after all rows, in MiB: of a server's processes together, each at its own."""
    pids = {name: tuple(one.pids.values()) for name, one in ours.items()}
    pids |= {peer.name: tuple(process.pid for process in tree(listeners(peer.url))) for peer in peers}
    peaks = {name: [peak_memory_mib(pid) or 0.0 for pid in own] for name, own in pids.items() if own}
    found = {(MEMORY, name): Figure(unit="MiB", values=(sum(own),)) for name, own in peaks.items()}
    for name, one in ours.items():
        found[WORKER_MEMORY, name] = Figure(unit="MiB", values=(_worker_mib(one) - bare_mib,))
    return found


def _bare_worker_mib(environment: Mapping[str, str]) -> float:
    """Of a process that has imported what a worker imports and opened its devices, and loaded nothing."""
    argv = [sys.executable, "-c", BARE_WORKER]
    ran = subprocess.run(argv, stdout=subprocess.PIPE, env=dict(environment), text=True, check=True)
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _add_hugging_face(
    comparison: Comparison, rows: Sequence[Row], report: Mapping[str, Mapping[str, float]] | None
) -> None:
    """Its medians, in the rows that its script has the like of."""
    if report is None:
        comparison.notes.append(f"{HUGGING_FACE}: not installed (`make oracle` installs it)")
        return
    comparison.servers = (*comparison.servers, HUGGING_FACE)
    for row in rows:
        match row:
            case Decoding():
                value = report["itl_ms"][str(row.batch)]
            case Prefilling():
                value = row.prompt_tokens / report["ttft_ms"][str(row.prompt_tokens)] * 1e3
            case _:
                continue
        comparison.figures[row.name, HUGGING_FACE] = Figure(unit=row.unit, values=(value,))
