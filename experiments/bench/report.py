"""The result of a run as a table for people and as JSON for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from moonshard.experiments.bench.costs.gateway_cost import gateway_grid
from moonshard.experiments.bench.costs.recording_cost import recorded_row_grid, recording_grid
from moonshard.experiments.bench.costs.routing import replay_grid, speed_grid
from moonshard.experiments.bench.costs.token_cost import token_grid
from moonshard.experiments.bench.formats.record import Formats
from moonshard.experiments.bench.formats.table import formats_grid, kernels_grid
from moonshard.experiments.bench.meshes.tables import MESH_GRIDS
from moonshard.experiments.bench.peers.beside import Beside
from moonshard.experiments.bench.peers.table import as_cells, beside_grids
from moonshard.experiments.bench.profile.record import Profile
from moonshard.experiments.bench.profile.table import profile_grids
from moonshard.experiments.bench.serving.arrangements import arrangement_grid
from moonshard.experiments.bench.serving.constrained import constrained_grid
from moonshard.experiments.bench.serving.failover import failover_grid
from moonshard.experiments.bench.serving.handoff import handoff_grid
from moonshard.experiments.bench.serving.speculation import speculation_grid
from moonshard.experiments.bench.sizes.record import TriedSizes
from moonshard.experiments.bench.sizes.table import sizes_grid
from moonshard.experiments.bench.tiers.record import TierTimes
from moonshard.experiments.bench.tiers.table import tiers_grid
from moonshard.experiments.bench.transfer.transport_rows import transport_grid
from moonshard.experiments.common.grid import Grid, as_markdown, as_table, number, spread
from moonshard.experiments.common.running.measurement import Measurement, Plan, as_json

NOT_INSTALLED = "not installed"
TITLES = {
    "device": "Device level, in one process",
    "start": "Start of `moonshard serve`, aggregated",
    "served": "Whole stack, aggregated, as clients see it",
    "disaggregated": "Whole stack, disaggregated, as clients see it",
}
LAID_OUT = (
    transport_grid,
    handoff_grid,
    *MESH_GRIDS,
    speed_grid,
    replay_grid,
    gateway_grid,
    token_grid,
    recording_grid,
    recorded_row_grid,
    arrangement_grid,
    failover_grid,
    constrained_grid,
    speculation_grid,
)  # those whose figures stand side by side
COLUMNS = ("what", "unit", "p50", "p90", "p99", "min to max", "n", "Hugging Face", "times faster", "than their best")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that was measured, and on what machine and versions."""

    stamp: str
    commit: str
    machine: Mapping[str, object]
    versions: Mapping[str, str]
    config: Mapping[str, str]
    plan: Plan
    measurements: Sequence[Measurement]
    peers: Mapping[tuple[str, str], Measurement]  # by our key
    peer_engine: str | None  # None: not installed, or not asked for
    peer_reports: Sequence[Mapping[str, object]]
    elapsed_s: float
    beside: Beside | None = None  # peers, where they were asked for
    profile: Profile | None = None
    formats: Formats | None = None
    sizes: TriedSizes | None = None
    tiers: TierTimes | None = None

    def times_faster(self, ours: Measurement) -> float | None:
        """Our median against the median of their rounds; None where they have no such figure."""
        theirs = self.peers.get(ours.key)
        return None if theirs is None else _times(ours, theirs.median)

    def times_faster_than_best(self, ours: Measurement) -> float | None:
        """Our median against their best round: the fairer figure where the machine was busy."""
        if (theirs := self.peers.get(ours.key)) is None:
            return None
        return _times(ours, max(theirs.samples) if ours.unit == "tokens/s" else min(theirs.samples))


def rows(report: Report, level: str) -> list[tuple[str, ...]]:
    """The cells of one level's table, as `COLUMNS`."""
    return [
        (one.name, one.unit, number(one.median), *_spread_cells(one), str(len(one.samples)), *_peer_cells(report, one))
        for one in report.measurements
        if one.level == level
    ]


def _spread_cells(one: Measurement) -> tuple[str, str, str]:
    """A single sample has neither quantiles nor a range."""
    if len(one.samples) == 1:
        return "", "", ""
    return number(one.quantile(0.9)), number(one.quantile(0.99)), spread(one)


def _peer_cells(report: Report, ours: Measurement) -> tuple[str, str, str]:
    theirs, times, times_best = (
        report.peers.get(ours.key),
        report.times_faster(ours),
        report.times_faster_than_best(ours),
    )
    if theirs is None or times is None or times_best is None:
        return "", "", ""
    return f"{number(theirs.median)} ({spread(theirs)})", f"{times:.2f}", f"{times_best:.2f}"


def _times(ours: Measurement, theirs: float) -> float:
    """How many times better ours is; above 1 where ours is better."""
    return ours.median / theirs if ours.unit == "tokens/s" else theirs / ours.median


def grids(report: Report) -> list[Grid]:
    """A table for each part that was measured."""
    plain = [Grid(title=title, columns=COLUMNS, rows=tuple(rows(report, level))) for level, title in TITLES.items()]
    laid_out = [lay_out(report.measurements, report.plan) for lay_out in LAID_OUT]
    real = [
        *beside_grids(report.beside),
        *profile_grids(report.profile),
        formats_grid(report.formats),
        kernels_grid(report.formats),
        sizes_grid(report.sizes),
        tiers_grid(report.tiers),
    ]
    return [grid for grid in (*plain, *laid_out, *real) if grid.rows]


def tables(report: Report) -> list[Table]:
    return [as_table(grid) for grid in grids(report)]


def markdown(report: Report) -> str:
    """The same tables for a README."""
    return "\n\n".join(as_markdown(grid) for grid in grids(report))


def footnotes(report: Report) -> list[str]:
    peer = (
        report.peer_engine or f"{NOT_INSTALLED} or not asked for, so its columns are empty (`make oracle` installs it)"
    )
    return [
        f"{report.machine['cores']} cores of {report.machine['cpu']}, {report.machine['memory_gib']} GiB, "
        f"load average before the run {report.machine['load_average_before']:.2f}; commit {report.commit}; "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        f"Hugging Face: {peer}. It may use every core; so may our worker, gateway and load generator together.",
        f"{report.plan.rounds} rounds of whole stack, device level and Hugging Face, then the other parts, as far as "
        f"they were asked for; {report.elapsed_s:.0f} s in all.",
    ]


def to_json(report: Report) -> dict[str, object]:
    return {
        "stamp": report.stamp,
        "commit": report.commit,
        "machine": report.machine,
        "versions": report.versions,
        "config": report.config,
        "plan": asdict(report.plan),
        "elapsed_s": report.elapsed_s,
        "measurements": [as_json(one) | _against_peer(report, one) for one in report.measurements],
        "huggingface": list(report.peer_reports),
        "peers": as_cells(report.beside),
        "profile": None if report.profile is None else asdict(report.profile),
        "formats": None if report.formats is None else asdict(report.formats),
        "sizes": None if report.sizes is None else asdict(report.sizes),
        "tiers": None if report.tiers is None else asdict(report.tiers),
    }


def _against_peer(report: Report, one: Measurement) -> dict[str, float | None]:
    return {
        "times_faster": report.times_faster(one),
        "times_faster_than_best_round": report.times_faster_than_best(one),
    }
