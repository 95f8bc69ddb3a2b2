"""The table of tried sizes: which candidate was best, and which `models.machines` has."""

from collections.abc import Iterator
from itertools import groupby

from moonshard.experiments.bench.sizes.record import Tried, TriedSizes
from moonshard.experiments.common.grid import Grid, number

COLUMNS = ("entry", "candidate", "", "ms, p50", "by the table's", "longest step, ms")
AS_GOOD = 0.02  # of the time: no candidate is better by less
TABLE, BEST, BETTER = "table", "best", "better"


def sizes_grid(found: TriedSizes | None) -> Grid:
    """No rows where nothing was tried."""
    rows = () if found is None else tuple(_rows(found.tried))
    kind = "" if found is None else found.kind
    return Grid(
        title=f"Sizes, on a machine of the kind {kind}", columns=COLUMNS, rows=rows, notes=NOTES if rows else ()
    )


NOTES = (
    "The table is models/machines.py. Candidates of an entry took turns, everything else as the table has it; "
    f"`{BEST}` is the quickest, `{BETTER}` one that is quicker than the table's by more than {AS_GOOD:.0%}. Times of "
    "several probes stand beside each other, and count together.",
    "chunk_tokens: whoever decodes in the same worker waits for a step, and a handoff for its last chunk's KV to be "
    "moved, so the quickest is not always the best.",
)


def _rows(tried: tuple[Tried, ...]) -> Iterator[tuple[str, ...]]:
    for entry, group in groupby(tried, key=lambda one: one.entry):
        ones = list(group)
        current = next(one for one in ones if one.is_current)
        best = min(ones, key=lambda one: one.total_ms)
        for one in ones:
            yield (
                entry,
                f"{one.candidate:g}",
                _verdict(one, current, best),
                "; ".join(f"{name}: {number(ms)}" for name, ms in one.ms.items()),
                f"{one.total_ms / current.total_ms:.3f}",
                number(one.longest_step_ms),
            )


def _verdict(one: Tried, current: Tried, best: Tried) -> str:
    told = [TABLE] if one.is_current else []
    if one is best:
        told.append(BEST if one.is_current or one.total_ms >= (1 - AS_GOOD) * current.total_ms else BETTER)
    return ", ".join(told)
