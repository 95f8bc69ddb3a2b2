"""A run's figures as two tables: what was sent and what came of it, with the goodput below, and the latencies."""

from collections.abc import Iterator

from moonshard.experiments.bench.grid import Grid, number
from moonshard.experiments.lab.fields import read_fields
from moonshard.experiments.lab.figures import PointFigures, goodputs, point_figures
from moonshard.experiments.lab.flat import below
from moonshard.experiments.lab.frames import RunFrames
from moonshard.experiments.lab.goodput import Slo

LOADS = (
    *("point", "requests", "failed", "late", "offered/s", "tokens/s", "cached", "in SLO", "good/s", "client, cores"),
)
LATENCIES = ("point", "ms", "p50", "p90", "p99")


def run_grids(run: RunFrames) -> tuple[Grid, Grid]:
    """Of the points that have a repeat that is done: what was sent and what came of it, and the latencies."""
    slo = slo_of(run)
    found = [(p.swept, one) for p in run.record.points if (one := point_figures(run, p.number, slo)) is not None]
    bounds = [
        f"{name.removesuffix('_ms').upper()} {bound:g} ms"
        for name in ("ttft_ms", "tpot_ms", "itl_ms")
        if (bound := getattr(slo, name)) is not None
    ]
    notes = [f"SLO: {', '.join(bounds) or 'none: to complete is enough'}."]
    notes += [_goodput_note(rest, rate, slo) for rest, rate in goodputs(found, slo.attainment).items()]
    loads = tuple(_load_row(one) for _, one in found)
    latencies = tuple(row for _, one in found for row in _latency_rows(one))
    return (
        Grid(title=f"{run.record.name} {run.path.name}", columns=LOADS, rows=loads, notes=tuple(notes)),
        Grid(title="Latencies of what completed", columns=LATENCIES, rows=latencies),
    )


def slo_of(run: RunFrames) -> Slo:
    """All points share it."""
    found = read_fields(Slo, below(run.record.points[0].settings, "slo"), "slo", [])
    return found or Slo()


def _goodput_note(rest: str, rate: float | None, slo: Slo) -> str:
    """`rest` is what those points set besides the rate."""
    said = "none of the rates that were offered" if rate is None else f"{number(rate)} requests/s"
    return f"Goodput at {slo.attainment:.0%}, {rest}: {said}."


def _load_row(one: PointFigures) -> tuple[str, ...]:
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


def _latency_rows(one: PointFigures) -> Iterator[tuple[str, ...]]:
    """Without those that nothing was measured of."""
    for name, values in (
        ("TTFT", one.ttft_ms),
        ("handoff gap", one.handoff_gap_ms),
        ("ITL", one.itl_ms),
        ("TPOT", one.tpot_ms),
        ("E2E", one.e2e_ms),
    ):
        if values:
            yield (one.label, name, *map(number, values))
