"""The tables beside peers: a row for each question, a column for each server, and what of the machine it shows.

One is of our servers with weights as the configuration has them, one of ours in float32. A cell is the median over
requests and in brackets the best of them. Only ours are held against the machine: how others keep their weights is not
known here.
"""

from collections.abc import Mapping
from dataclasses import asdict

from moonshard.experiments.bench.floors.work import Ceilings, Work
from moonshard.experiments.bench.peers.beside import AGGREGATED, APART, IN_FLOAT32, OURS, Beside
from moonshard.experiments.bench.peers.compare import Comparison, Figure
from moonshard.experiments.bench.peers.rows import Row, seconds_of
from moonshard.experiments.common.grid import Grid, number

LESS_IS_BETTER = ("ms", "s", "MiB")
MACHINE_COLUMNS = ("least MB", "least GFLOP", "of read bandwidth", "of f32 rate")


def beside_grids(beside: Beside | None) -> list[Grid]:
    """None where nothing was compared."""
    if beside is None:
        return []
    titles = {AGGREGATED: f"Beside peers, {beside.folder.name}", IN_FLOAT32: "Beside peers, our weights in float32"}
    return [_grid(beside, name, titles[name]) for name in beside.least]


def _grid(beside: Beside, ours: str, title: str) -> Grid:
    comparison = beside.comparison
    shown = (ours, APART) if ours == AGGREGATED else (ours,)
    servers = [name for name in comparison.servers if name in shown or name not in OURS]
    by_name = {row.name: row for row in beside.rows}
    names = dict.fromkeys(name for name, server in comparison.figures if server in servers)
    rows = []
    for name in (*by_name, *(name for name in names if name not in by_name)):
        cells = [_cell(comparison.figures.get((name, server))) for server in servers]
        machine = _machine_cells(beside, by_name[name], ours) if name in by_name else ("",) * len(MACHINE_COLUMNS)
        rows.append((name, _unit(comparison, name), *cells, _against(comparison, name, ours), *machine))
    columns = ("what", "unit", *servers, "times better than the best peer", *MACHINE_COLUMNS)
    notes = (*_notes(beside, ours), *(comparison.notes if ours == AGGREGATED else ()))
    return Grid(title=title, columns=columns, rows=tuple(rows), notes=notes)


def as_cells(beside: Beside | None) -> list[dict[str, object]]:
    """Every cell with its samples, for the report's file."""
    if beside is None:
        return []
    return [
        {"what": name, "server": server, **asdict(figure)}
        for (name, server), figure in beside.comparison.figures.items()
    ]


def times_better(comparison: Comparison, name: str, ours: str = AGGREGATED) -> tuple[float, float] | None:
    """How many times better that server of ours is than the best peer of a row, above 1 where it is better.

    By medians, and by the best requests; the best median and the best request may be of different peers. None where one
    side has no figure.
    """
    own = comparison.figures.get((name, ours))
    peers = (server for server in comparison.servers if server not in OURS)
    theirs = [comparison.figures[name, server] for server in peers if (name, server) in comparison.figures]
    if own is None or not theirs:
        return None
    medians, bests = [each.median for each in theirs], [each.best for each in theirs]
    if own.unit in LESS_IS_BETTER:
        return min(medians) / own.median, min(bests) / own.best
    return own.median / max(medians), own.best / max(bests)


def _against(comparison: Comparison, name: str, ours: str) -> str:
    found = times_better(comparison, name, ours)
    if found is None:
        return ""
    median, best = (f"{times:.2f}" for times in found)
    return _pair(median, best, comparison.figures[name, ours])


def _machine_cells(beside: Beside, row: Row, ours: str) -> tuple[str, ...]:
    work = beside.least[ours].work.get(row.name)
    if work is None:
        return ("",) * len(MACHINE_COLUMNS)
    least = (number(work.num_bytes / 1e6), number(work.num_flops / 1e9))
    figure = beside.comparison.figures.get((row.name, ours))
    return (*least, "", "") if figure is None else (*least, *_shares(work, row, figure, beside.ceilings))


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


def _notes(beside: Beside, ours: str) -> tuple[str, ...]:
    ceilings, figures, least = beside.ceilings, beside.comparison.figures, beside.least[ours]
    repeated = sum(figure.num_repeated for figure in figures.values())
    kept: Mapping[str, int] = {
        f"{name}, {server}": figure.num_disturbed for (name, server), figure in figures.items() if figure.num_disturbed
    }
    disturbed = "; ".join(f"{what}: {count}" for what, count in kept.items())
    return (
        f"This machine reads {ceilings.bytes_per_s / 1e9:.1f} GB/s and computes "
        f"{ceilings.matmul_flops_per_s / 1e9:.0f} GFLOP/s in float32, measured in this run. What a row needs at the "
        f"least is of our weights, {least.item_bytes.weights:g} bytes each and {least.item_bytes.of_experts:g} of "
        "experts, read once in a step, experts as an even router hits them; the share is of the time that the median "
        f"(best) request of {ours} took.",
        f"Our workers' weights take {least.weights_mib:,.0f} MiB, and their pool of KV, where it is full, "
        f"{least.pool_mib:,.0f} MiB.",
        f"{repeated} samples of all servers were taken again because other processes took part; disturbed to the end "
        f"and kept all the same: {disturbed or 'none'}.",
    )
