"""A run's summary as two tables: what was sent and what came of it, with the goodput below, and the latencies."""

from collections.abc import Iterator

from moonshard.experiments.common.fields import ExperimentError, read_fields
from moonshard.experiments.common.flat import below
from moonshard.experiments.common.grid import Grid, number
from moonshard.experiments.common.slo import Slo
from moonshard.experiments.reading.summary import PointSummary, goodputs, point_summary
from moonshard.experiments.reading.tables.frames import RunFrames
from moonshard.experiments.runner.run_record import code_changes

LOADS = (
    "point",
    "requests",
    "failed",
    "late",
    "offered/s",
    "tokens/s",
    "cached",
    "SLO attainment",
    "good/s",
    "client, cores",
)
LATENCIES = ("point", "ms", "p50", "p90", "p99")


def run_grids(run: RunFrames) -> tuple[Grid, Grid]:
    """Two tables over the points with a finished repeat: what was sent and what came of it, and the latencies."""
    slo = slo_of(run)
    found = [(p.swept, one) for p in run.record.points if (one := point_summary(run, p.number, slo)) is not None]
    bounds = [
        f"{name.removesuffix('_ms').upper()} {bound:g} ms"
        for name in ("ttft_ms", "tpot_ms", "max_itl_ms")
        if (bound := getattr(slo, name)) is not None
    ]
    notes = [f"SLO: {', '.join(bounds) or 'none: to complete is enough'}."]
    notes += [_goodput_note(rest, rate, slo) for rest, rate in goodputs(found, slo.attainment).items()]
    notes += [f"{one.label}: {clipped(one.num_clipped)}." for _, one in found if one.num_clipped]
    notes += [f"This run is {run.whats_missing}."] if run.whats_missing else []
    notes += [f"Measured with more than one code: {change}." for change in code_changes(run.record.starts)]
    loads = tuple(_load_row(one) for _, one in found)
    latencies = tuple(row for _, one in found for row in _latency_rows(one))
    return (
        Grid(title=f"{run.record.name} {run.path.name}", columns=LOADS, rows=loads, notes=tuple(notes)),
        Grid(title="Latencies of what completed", columns=LATENCIES, rows=latencies),
    )


def clipped(num_requests: int) -> str:
    return f"{num_requests:,} {'request was' if num_requests == 1 else 'requests were'} cut to the context"


def slo_of(run: RunFrames) -> Slo:
    """The run's objectives, which all its points share. ExperimentError for a run of another version."""
    faults: list[str] = []
    found = read_fields(Slo, below(run.record.points[0].settings, "slo"), "slo", faults)
    if found is None:
        raise ExperimentError(*(f"{run.path}: {fault}" for fault in faults))
    return found


def _goodput_note(rest: str, rate: float | None, slo: Slo) -> str:
    """The note on goodput. `rest` is what these points set besides the rate."""
    said = "none of the rates that were offered" if rate is None else f"{number(rate)} requests/s"
    return f"Goodput at {slo.attainment:.0%}, {rest}: {said}."


def _load_row(one: PointSummary) -> tuple[str, ...]:
    return (
        one.label,
        f"{one.num_requests:,}",
        f"{one.num_failed:,}",
        f"{one.num_late:,}",
        "closed" if one.offered_per_s is None else number(one.offered_per_s),
        number(one.output_tokens_per_s),
        f"{one.cached_share:.0%}",
        f"{one.attained:.1%}",
        number(one.good_per_s),
        f"{one.client_cores:.2f}",
    )


def _latency_rows(one: PointSummary) -> Iterator[tuple[str, ...]]:
    """The rows of latencies that were measured."""
    for name, values in (
        ("TTFT", one.ttft_ms),
        ("handoff gap", one.handoff_gap_ms),
        ("ITL", one.itl_ms),
        ("TPOT", one.tpot_ms),
        ("E2E", one.e2e_ms),
    ):
        if values:
            yield (one.label, name, *map(number, values))
