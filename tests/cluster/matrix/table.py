"""The measured cells as a table for README, and what a cell must keep to.

`python -m tests.cluster.matrix.table CELLS...` prints that of the files that `command` has written.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from moonshard.experiments.common.grid import Grid, as_markdown
from tests.cluster.matrix.cell import PATIENCE_FOR_GATEWAYS_S, Cell
from tests.cluster.matrix.deployments.arrangement import GANG_TIMEOUT_S, ROWS
from tests.cluster.matrix.deployments.commands import GATEWAYS, MASTER

COLUMNS = (
    "what",
    "befalls",
    "noticed, s",
    "without a token, s",
    "before, s",
    "whole again, s",
    "lost",
    "wrong",
    "leaked",
)
KILLED_S = 1.0  # a killed process is noticed within this
SILENT_S = GANG_TIMEOUT_S + 1.0  # one that says nothing
NEXT_TOKEN_S = 2.0  # from when it is noticed to the next token of everybody
SLOW = "10x slower for 8 s"
UNNOTICED = (SLOW,)  # by some; nothing bounds it


def _name(process: str) -> str:
    """`decode 0.1` is a follower, `decode 0` its leader."""
    role, _, member = process.partition(" 0")
    return process if role == process else f"{role}, {'follower' if member else 'leader'}"


def as_grid(cells: Iterable[Cell]) -> Grid:
    return Grid(title="What becomes of requests", columns=COLUMNS, rows=tuple(_row(cell) for cell in cells))


def _row(cell: Cell) -> tuple[str, ...]:
    return (
        cell.fault,
        _name(cell.process),
        "no" if cell.noticed_s is None else f"{cell.noticed_s:.2f}",
        f"{cell.wait_s:.2f}",
        f"{cell.calm_s:.2f}",
        "no" if cell.whole_s is None else f"{cell.whole_s:.1f}",
        f"{cell.num_lost} of {cell.num_requests}",
        str(cell.num_wrong),
        str(len(cell.leaked)),
    )


def faults_of(cell: Cell) -> list[str]:
    """What the cell does not keep to, in words."""
    found = [
        f"{name}: {value}"
        for name, value in {"lost": cell.num_lost, "wrong": cell.num_wrong, "leaked": cell.leaked}.items()
        if value
    ]
    if cell.whole_s is None:
        found.append("it did not come back")
    is_elsewhere = ROWS[cell.process] == "ray"  # a worker comes back at another address, given up until it is ready
    if cell.others and not is_elsewhere and cell.process not in GATEWAYS and cell.fault not in UNNOTICED:
        found.append(f"others were given up: {cell.others}")
    if (bound_s := _noticed_within_s(cell)) is not None and (cell.noticed_s is None or cell.noticed_s > bound_s):
        found.append(f"noticed after {cell.noticed_s} s, not {bound_s}")
    waited_s = (cell.noticed_s or 0.0) + NEXT_TOKEN_S + cell.calm_s
    if cell.fault not in UNNOTICED and cell.wait_s > waited_s:
        found.append(f"without a token for {cell.wait_s:.2f} s, noticed after {cell.noticed_s}")
    return found


def _noticed_within_s(cell: Cell) -> float | None:
    """None where nobody has to."""
    if cell.fault == "kill -9":
        return KILLED_S
    if cell.fault in UNNOTICED or cell.process == MASTER:  # whom nobody waits for
        return None
    return PATIENCE_FOR_GATEWAYS_S + 1.0 if cell.process in GATEWAYS else SILENT_S


def by_place(cells: Iterable[Cell]) -> Mapping[tuple[str, str], Cell]:
    return {(cell.process, cell.fault): cell for cell in cells}


def as_table(cells: Iterable[Cell]) -> str:
    """As README has it."""
    return "\n".join(as_markdown(as_grid(cells)).splitlines()[2:])


def main(paths: Sequence[str]) -> None:
    lines = [line for path in paths for line in Path(path).read_bytes().splitlines()]
    cells = [msgspec.json.decode(line, type=Cell) for line in lines]
    print(as_table(cells))  # noqa: T201
    for cell in cells:
        for fault in faults_of(cell):
            print(f"{cell.process}, {cell.fault}: {fault}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
