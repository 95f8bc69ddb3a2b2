"""A run's figures as a table: a row for each point, and its goodput below."""

from collections.abc import Sequence

from moonshard.experiments.bench.grid import Grid, number
from moonshard.experiments.lab.fields import read_fields
from moonshard.experiments.lab.figures import PointFigures, goodputs, point_figures
from moonshard.experiments.lab.flat import below
from moonshard.experiments.lab.frames import RunFrames
from moonshard.experiments.lab.goodput import Slo

COLUMNS = (
    "point",
    "repeats",
    "requests",
    "failed",
    "late",
    "offered/s",
    "TTFT p50, p90, p99 ms",
    "ITL p50, p90, p99 ms",
    "handoff gap p50, p90, p99 ms",
    "E2E p50, p90, p99 ms",
    "output tokens/s",
    "cached",
    "in SLO",
    "good/s",
    "client, cores",
)


def run_grid(run: RunFrames) -> Grid:
    """Of the points that have a repeat that is done."""
    found = [
        (p.swept, one) for p in run.record.points if (one := point_figures(run, p.number, slo_of(run))) is not None
    ]
    slo = slo_of(run)
    bounds = [
        f"{name.removesuffix('_ms').upper()} {bound:g} ms"
        for name in ("ttft_ms", "tpot_ms", "itl_ms")
        if (bound := getattr(slo, name)) is not None
    ]
    notes = [f"SLO: {', '.join(bounds) or 'none: to complete is enough'}."]
    notes += [_goodput_note(rest, rate, slo) for rest, rate in goodputs(found, slo.attainment).items()]
    return Grid(
        title=f"{run.record.name} {run.path.name}",
        columns=COLUMNS,
        rows=tuple(_row(one) for _, one in found),
        notes=tuple(notes),
    )


def slo_of(run: RunFrames) -> Slo:
    """All points share it."""
    found = read_fields(Slo, below(run.record.points[0].settings, "slo"), "slo", [])
    return found or Slo()


def _goodput_note(rest: str, rate: float | None, slo: Slo) -> str:
    """`rest` is what those points set besides the rate."""
    said = "none of the rates that were offered" if rate is None else f"{number(rate)} requests/s"
    return f"Goodput at {slo.attainment:.0%}, {rest}: {said}."


def _row(one: PointFigures) -> tuple[str, ...]:
    return (
        one.label,
        str(one.num_repeats),
        f"{one.num_requests:,}",
        f"{one.num_failed:,}",
        f"{one.num_late:,}",
        "closed loop" if one.offered_per_s is None else number(one.offered_per_s),
        _three(one.ttft_ms),
        _three(one.itl_ms),
        _three(one.handoff_gap_ms),
        _three(one.e2e_ms),
        number(one.output_tokens_per_s),
        f"{one.cached_share:.0%}",
        f"{one.attained:.1%}",
        number(one.good_per_s),
        f"{one.client_cores:.2f}",
    )


def _three(values: Sequence[float]) -> str:
    return "  ".join(map(number, values)) or "-"
