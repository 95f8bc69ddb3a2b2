"""The table beside peers: a row for each question, a column for each server, and what of the machine it shows.

A cell is the median over requests and in brackets the best of them. Only ours are held against the machine: how others
keep their weights is not known here.
"""

from collections.abc import Mapping
from dataclasses import asdict

from moonshard.experiments.bench.floors.work import Ceilings, Work
from moonshard.experiments.bench.peers.beside import AGGREGATED, OURS, Beside
from moonshard.experiments.bench.peers.compare import Comparison, Figure
from moonshard.experiments.bench.peers.rows import Row, seconds_of
from moonshard.experiments.common.grid import Grid, number

LESS_IS_BETTER = ("ms", "s", "MiB")
MACHINE_COLUMNS = ("least MB", "least GFLOP", "of read bandwidth", "of f32 rate")


def beside_grid(beside: Beside | None) -> Grid:
    """Empty where nothing was compared."""
    if beside is None:
        return Grid(title="", columns=(), rows=())
    comparison, servers = beside.comparison, beside.comparison.servers
    by_name = {row.name: row for row in beside.rows}
    names = dict.fromkeys(name for name, _ in comparison.figures)
    rows = []
    for name in (*by_name, *(name for name in names if name not in by_name)):
        cells = [_cell(comparison.figures.get((name, server))) for server in servers]
        ours = comparison.figures.get((name, AGGREGATED))
        machine = _machine_cells(beside, by_name[name], ours) if name in by_name else ("",) * len(MACHINE_COLUMNS)
        rows.append((name, _unit(comparison, name), *cells, _against(comparison, name), *machine))
    columns = ("what", "unit", *servers, "times better than the best peer", *MACHINE_COLUMNS)
    title = f"Beside peers, {beside.folder.name}"
    return Grid(title=title, columns=columns, rows=tuple(rows), notes=(*_notes(beside), *comparison.notes))


def as_cells(beside: Beside | None) -> list[dict[str, object]]:
    """Every cell with its samples, for the report's file."""
    if beside is None:
        return []
    return [
        {"what": name, "server": server, **asdict(figure)}
        for (name, server), figure in beside.comparison.figures.items()
    ]


def times_better(comparison: Comparison, name: str) -> tuple[float, float] | None:
    """How many times better we are than the best peer of a row: by medians, and by the best requests; above 1 we are.

    The best median and the best request may be of different peers. None where one side has no figure.
    """
    ours = comparison.figures.get((name, AGGREGATED))
    peers = (server for server in comparison.servers if server not in OURS)
    theirs = [comparison.figures[name, server] for server in peers if (name, server) in comparison.figures]
    if ours is None or not theirs:
        return None
    medians, bests = [each.median for each in theirs], [each.best for each in theirs]
    if ours.unit in LESS_IS_BETTER:
        return min(medians) / ours.median, min(bests) / ours.best
    return ours.median / max(medians), ours.best / max(bests)


def _against(comparison: Comparison, name: str) -> str:
    found = times_better(comparison, name)
    if found is None:
        return ""
    median, best = (f"{times:.2f}" for times in found)
    return _pair(median, best, comparison.figures[name, AGGREGATED])


def _machine_cells(beside: Beside, row: Row, ours: Figure | None) -> tuple[str, ...]:
    work = beside.least.work.get(row.name)
    if work is None:
        return ("",) * len(MACHINE_COLUMNS)
    least = (number(work.num_bytes / 1e6), number(work.num_flops / 1e9))
    return (*least, "", "") if ours is None else (*least, *_shares(work, row, ours, beside.ceilings))


def _shares(work: Work, row: Row, ours: Figure, ceilings: Ceilings) -> tuple[str, str]:
    floors_s = work.num_bytes / ceilings.bytes_per_s, work.num_flops / ceilings.matmul_flops_per_s
    median_s, best_s = seconds_of(row, ours.median), seconds_of(row, ours.best)
    of_bandwidth, of_rate = (_pair(f"{s / median_s:.0%}", f"{s / best_s:.0%}", ours) for s in floors_s)
    return of_bandwidth, of_rate


def _cell(figure: Figure | None) -> str:
    return "" if figure is None else _pair(number(figure.median), number(figure.best), figure)


def _pair(median: str, best: str, figure: Figure) -> str:
    return f"{median} ({best})" if len(figure.values) > 1 else median


def _unit(comparison: Comparison, name: str) -> str:
    return next((figure.unit for (row, _), figure in comparison.figures.items() if row == name), "")


def _notes(beside: Beside) -> tuple[str, ...]:
    ceilings, figures = beside.ceilings, beside.comparison.figures
    repeated = sum(figure.num_repeated for figure in figures.values())
    kept: Mapping[str, int] = {
        f"{name}, {server}": figure.num_disturbed for (name, server), figure in figures.items() if figure.num_disturbed
    }
    disturbed = "; ".join(f"{what}: {count}" for what, count in kept.items())
    return (
        f"This machine reads {ceilings.bytes_per_s / 1e9:.1f} GB/s and computes "
        f"{ceilings.matmul_flops_per_s / 1e9:.0f} GFLOP/s in float32, measured in this run. What a row needs at the "
        f"least is of our weights, {beside.least.item_bytes.weights:g} bytes each, read once in a step, experts as an "
        "even router hits them; the share is of the time that the median (best) request of our aggregated server took.",
        f"Our workers' weights take {beside.least.weights_mib:,.0f} MiB, and their pool of KV, where it is full, "
        f"{beside.least.pool_mib:,.0f} MiB.",
        f"{repeated} samples were taken again because other processes took part; disturbed to the end and kept all the "
        f"same: {disturbed or 'none'}.",
    )
