"""`-m moonshard.experiments.training.run.train`: trains the embedded model, or goes on with a run that was stopped.

Plain argparse: it runs on machines that have jax, optax, orbax and the tokenizers, and no more. Exit codes: 0
when the recipe is done, 1 when the run cannot go on, 128 and the signal's number when it was told to stop.
"""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from moonshard.experiments.training.run.journal import RUN_FOLDER
from moonshard.experiments.training.run.loop import Rhythm, train
from moonshard.experiments.training.run.recipe import RECIPES, Recipe, RunFailed
from moonshard.experiments.training.shape import HUGGING_FACE_CONFIG
from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.training.texts.lessons import PocketLessons


class StopSignal:
    """Notes SIGINT and SIGTERM. A second signal kills, as it would without this."""

    def __init__(self) -> None:
        self.received: int | None = None

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        signal.signal(number, signal.SIG_DFL)


def read_options(arguments: Sequence[str]) -> tuple[Recipe, Path]:
    """The recipe as the command line changes it, and the run's folder."""
    parser = argparse.ArgumentParser(prog="python -m moonshard.experiments.training.run.train", description=__doc__)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="cpu")
    parser.add_argument("--out", type=Path, default=RUN_FOLDER, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--optimiser", choices=("muon", "adamw"))
    parser.add_argument("--learning-rate", type=float)
    options = parser.parse_args(arguments)
    changes = {name: getattr(options, name) for name in ("seed", "optimiser", "learning_rate")}
    changes = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(RECIPES[options.recipe], **changes), options.out


def run(training: Callable[[StopSignal], int]) -> int:
    """Trains until the end or a signal. Returns the exit code."""
    stop = StopSignal()
    stop.listen()
    try:
        num_steps = training(stop)
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if stop.received is not None:
        print(f"stopped after {num_steps} steps; the same command goes on from there", file=sys.stderr)
        return 128 + stop.received
    return 0


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    recipe, folder = read_options(sys.argv[1:])
    lessons = PocketLessons(pocket_text(), recipe.seed)
    return run(
        lambda stop: train(
            recipe,
            HUGGING_FACE_CONFIG,
            lessons,
            folder,
            rhythm=Rhythm(),
            is_stopping=lambda: stop.received is not None,
            say=say,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
