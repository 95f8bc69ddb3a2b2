"""`python -m moonshard.experiments.pocket.report`: a run's curves as a picture.

Loss, held-out accuracy and router load over tokens, from the run's journal; dashed lines are where rows become longer.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from moonshard.experiments.pocket.train import RUN_FOLDER

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Record = Mapping[str, Any]
PICTURE = Path(__file__).parent / "curves.png"
SMOOTHED = 5  # records, of 20 steps each
MAX_LOAD = 1.5


def read(journal: Path) -> tuple[list[Record], dict[str, list[Record]]]:
    """Records of the steps, and those of the held-out measurements by skill."""
    steps: list[Record] = []
    skills: dict[str, list[Record]] = defaultdict(list)
    for line in journal.read_text().splitlines():
        record = json.loads(line)
        if "skill" in record:
            skills[record["skill"]].append(record)
        else:
            steps.append(record)
    return steps, skills


def draw(steps: list[Record], skills: Mapping[str, list[Record]], path: Path) -> None:
    figure, (losses, answers, loads) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    at = [record["step"] for record in steps]
    xs = [record["tokens"] / 1e6 for record in steps]
    losses.plot(xs, [record["loss"] for record in steps], color="0.8")
    losses.plot(xs, smooth([record["loss"] for record in steps]), color="C0")
    losses.set(yscale="log", title="loss on the assistant's tokens, nats")
    for skill, records in skills.items():
        shares = [100 * record["answers_right"] for record in records]
        answers.plot(np.interp([record["step"] for record in records], at, xs), shares, marker=".", label=skill)
    answers.set(ylim=(0, 101), title="held-out answers wholly right, % (teacher-forced)")
    answers.legend()
    loads.plot(xs, [record["load"] for record in steps], color="C3")
    loads.axhline(MAX_LOAD, color="0.5", linewidth=0.8)
    loads.set(ylim=(1, 4), title="router load, max / mean of the worst layer")
    for axes in (losses, answers, loads):
        axes.set_xlabel("million tokens")
        axes.grid(alpha=0.3)
        mark_stages(axes, steps)
    figure.savefig(path, dpi=110)


def smooth(values: Iterable[float]) -> np.ndarray:
    padded = np.pad(np.asarray(list(values)), SMOOTHED // 2, mode="edge")
    return np.convolve(padded, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")


def mark_stages(axes: Axes, steps: list[Record]) -> None:
    for before, after in pairwise(steps):
        if before["stage"] != after["stage"]:
            axes.axvline(before["tokens"] / 1e6, color="0.6", linestyle="--", linewidth=0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=RUN_FOLDER)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    steps, skills = read(options.run / "metrics.jsonl")
    draw(steps, skills, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
