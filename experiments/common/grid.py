"""A table of the report as plain text cells, and its two forms: for a terminal and for a README.

A part of the benchmark can lay out its own table with it, where the report's form does not fit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from moonshard.experiments.common.running.measurement import Measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A table of text cells. The first column names what the others measure."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def _repr_markdown_(self) -> str:
        """The form in which a notebook shows it."""
        return as_markdown(self)


def as_table(grid: Grid) -> Table:
    notes = escape("\n".join(grid.notes)) or None
    table = Table(title=grid.title, title_justify="left", caption=notes, caption_justify="left")
    for index, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in grid.rows:
        table.add_row(*map(escape, row))
    return table


def as_markdown(grid: Grid) -> str:
    rule = ["---", *["---:"] * (len(grid.columns) - 1)]
    lines = [f"### {grid.title}", "", *map(_line, (grid.columns, rule, *grid.rows))]
    return "\n".join([*lines, *([""] if grid.notes else []), *(f"- {note}" for note in grid.notes)])


def number(value: float) -> str:
    """A number with three significant digits, without an exponent."""
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    digits = 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{digits}f}"


def spread(one: Measurement) -> str:
    return f"{number(min(one.samples))} to {number(max(one.samples))}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def verdict(is_held: bool) -> str:
    """Of a bar."""
    return "held" if is_held else "missed"
