"""`python -m tests.cluster.matrix.command gangs OUT`: measures cells of the fault matrix, each into OUT as it is done.

It makes a network of its own for that, which only root may.
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tests.cluster.matrix.deployments.machines import alone

if TYPE_CHECKING:
    from tests.cluster.matrix.deployments.deployment import Deployment

MODULE = "tests.cluster.matrix.command"
ENDS = ("kill -9", "SIGSTOP")  # the faults that `--random` draws from


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    alone(MODULE, arguments)
    from tests.cluster.matrix.deployments.arrangement import ARRANGEMENTS

    if options.arrangement == "ray":
        from tests.cluster.matrix.deployments.on_ray import OnRay as kind
    else:
        from tests.cluster.matrix.deployments.apart import Apart as kind

    options.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        kind(ARRANGEMENTS[options.arrangement], options.log or Path(folder, "log")).running() as deployment,
        options.out.open("ab", buffering=0) as out,
    ):
        for found in _measured(deployment, options):
            told = msgspec.json.encode(found) + b"\n"
            out.write(told)
            sys.stdout.buffer.write(told)
            sys.stdout.flush()
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("arrangement", help="gangs, store or ray")
    parser.add_argument("out", type=Path)
    parser.add_argument("--log", type=Path, help="where to keep what all processes say")
    parser.add_argument("--processes", nargs="*", help="rows of the matrix; by default all")
    parser.add_argument("--faults", nargs="*", help="columns; likewise")
    parser.add_argument("--random", type=int, metavar="N", help="instead so many kills and stops, drawn at random")
    parser.add_argument("--calm", type=float, metavar="SECONDS", help="instead a load alone, for so long")
    return parser.parse_args(arguments)


def _measured(deployment: "Deployment", options: argparse.Namespace) -> Iterator[msgspec.Struct]:
    from tests.cluster.matrix import calm, cell
    from tests.cluster.matrix.deployments.arrangement import ROWS
    from tests.cluster.matrix.faults import FAULTS

    rows = [row for row, arrangement in ROWS.items() if arrangement == options.arrangement]
    if options.calm is not None:
        yield calm.measure(deployment, options.calm, seed=0)
        return
    if options.random is None:
        cells = itertools.product(options.processes or rows, options.faults or FAULTS)
    else:
        drawn = random.Random(0)
        cells = ((drawn.choice(rows), drawn.choice(ENDS)) for _ in range(options.random))
    for seed, (process, fault) in enumerate(cells):
        yield cell.measure(deployment, process, fault, seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
