"""`python -m moonshard.experiments.training.report`: a run's curves as a picture.

Loss, held-out accuracy and router load over tokens, from the run's journal; dashed lines mark where a stage ends. It
reads no checkpoint and loads no jax, so that it can look at a run that is still going on.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moonshard.experiments.training.run.journal import METRICS, RUN_FOLDER
from moonshard.experiments.training.run.recipe import RunFailed

Record = Mapping[str, Any]
PICTURE = Path(__file__).parent / "curves.png"
SMOOTHED = 5  # records, of 20 steps each
MAX_LOAD = 1.5


def read(run: Path) -> tuple[list[Record], dict[str, list[Record]]]:
    """The records of steps, and those of held-out measurements by skill. A half-written last line is ignored.

    RunFailed where there is no journal, none that can be read, or no step in it yet.
    """
    path = run / METRICS
    steps: list[Record] = []
    skills: dict[str, list[Record]] = defaultdict(list)
    try:
        written = path.read_text()
        records = [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]
    except OSError as error:
        raise RunFailed(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RunFailed(f"{path}: damaged: {error}") from error
    for record in records:
        (skills[record["skill"]] if "skill" in record else steps).append(record)
    if not steps:
        raise RunFailed(f"{path}: no step was written down yet")
    return steps, skills


def draw(steps: list[Record], skills: Mapping[str, list[Record]]) -> Figure:
    """Draws at least one step; skills may be missing."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    losses, answers, loads = figure.subplots(1, 3)
    xs = [record["tokens"] / 1e6 for record in steps]
    losses.plot(xs, [record["loss"] for record in steps], color="0.8")
    losses.plot(xs, smooth([record["loss"] for record in steps]), color="C0")
    losses.set(yscale="log", title="loss on the assistant's tokens, nats")
    draw_answers(answers, [record["step"] for record in steps], xs, skills)
    loads.plot(xs, [record["load"] for record in steps], color="C3")
    loads.axhline(MAX_LOAD, color="0.5", linewidth=0.8)
    loads.set(ylim=(1, 4), title="router load, max / mean of the worst layer")
    for axes in (losses, answers, loads):
        axes.set_xlabel("million tokens")
        axes.grid(alpha=0.3)
        mark_stages(axes, steps)
    return figure


def draw_answers(axes: Axes, at: list[int], xs: list[float], skills: Mapping[str, list[Record]]) -> None:
    """A curve per skill over `xs`, million tokens `at` those steps; measurements in between are interpolated."""
    for skill, records in skills.items():
        shares = [100 * record["answers_right"] for record in records]
        axes.plot(np.interp([record["step"] for record in records], at, xs), shares, marker=".", label=skill)
    axes.set(ylim=(0, 101), title="held-out answers wholly right, % (teacher-forced)")
    if skills:
        axes.legend(loc="lower right")


def smooth(values: Iterable[float]) -> np.ndarray:
    padded = np.pad(np.asarray(list(values)), SMOOTHED // 2, mode="edge")
    return np.convolve(padded, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")


def mark_stages(axes: Axes, steps: list[Record]) -> None:
    """Marks the last record of each stage but the last with a line."""
    for before, after in pairwise(steps):
        if before["stage"] != after["stage"]:
            axes.axvline(before["tokens"] / 1e6, color="0.6", linestyle="--", linewidth=0.8)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moonshard.experiments.training.report", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=RUN_FOLDER, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="default: %(default)s")
    options = parser.parse_args()
    try:
        draw(*read(options.run)).savefig(options.out, dpi=110)
    except (RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
