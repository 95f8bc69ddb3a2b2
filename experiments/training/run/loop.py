"""The run: step after step, telling how it goes, saving what it has, going on where it was killed.

The next rows are made in a thread while the devices work. Whoever starts it decides what stops it: `is_stopping` is
asked after every step. Of what is due after a step a checkpoint is the last: a run killed before it comes to that step
again, and does again what was due, so that a run that is done lacks no line and no measurement.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from moonshard.experiments.training.folder import claim
from moonshard.experiments.training.measure import measure
from moonshard.experiments.training.run.checkpoints import Checkpoints
from moonshard.experiments.training.run.journal import RunJournal, tell
from moonshard.experiments.training.run.progress import Taken, accuracy_line, accuracy_records, line, summarise
from moonshard.experiments.training.run.recipe import Lessons, Recipe, Rows, RunFailed
from moonshard.experiments.training.run.step import TrainState, Weights, build_predict, build_step, first_state, place
from moonshard.models.model import LatentModel
from moonshard.models.registry import latent_model_of
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

NUM_STEPS_AHEAD = 2  # whose rows are made before they are asked for
CHECKPOINTS = "checkpoints"  # in a run's folder
WEIGHTS = "weights"  # in a checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Rhythm:
    """How often a run prints, measures and saves."""

    steps_per_line: int = 20
    steps_per_measurement: int = 250
    seconds_per_checkpoint: float = 300.0


def train(
    recipe: Recipe,
    shape: Mapping[str, Any],
    lessons: Lessons,
    folder: Path,
    *,
    rhythm: Rhythm,
    is_stopping: Callable[[], bool],
    say: Callable[[str], None],
) -> int:
    """Trains to the recipe's end, or until it is told to stop.

    Args:
        shape: the model's config.json.
        folder: of this run; a run that is in it already goes on.

    Returns:
        How many steps are done and saved.

    Raises:
        RunFailed: the folder cannot be written, is another run's just now, or holds a run of another kind, one of
            which nothing can be read, or one that lost a checkpoint which its recipe averages.
    """
    with claim(folder):
        tell(folder, recipe, shape)
        model, mesh = latent_model_of(shape), build_mesh(MeshShape(data=jax.device_count()))
        checkpoints = Checkpoints(folder / CHECKPOINTS, kept=recipe.averaged)
        state = _resume(first_state(recipe, model, mesh, lessons.alike()), checkpoints, mesh, say)
        first = int(state.step)
        if lost := [step for step in recipe.averaged if step <= first and not checkpoints.has(step)]:
            raise RunFailed(f"{folder}: step {lost[0]}, which is to be averaged, has no checkpoint any more")
        say(f"{recipe.num_steps} steps, {recipe.num_tokens:,} tokens, on {mesh.size} device(s); {first} steps are done")
        duties = _Duties(
            recipe=recipe,
            rhythm=rhythm,
            journal=RunJournal(folder, first),
            checkpoints=checkpoints,
            predict=build_predict(recipe, model, mesh),
            held_out=lessons.held_out(),
            say=say,
        )
        with _steps(recipe, model, lessons, mesh, state) as steps:
            for step, state, taken in steps:
                is_end = step == recipe.num_steps or is_stopping()
                duties.after(step, state, taken, is_end=is_end)
                if is_end:
                    return step
        return first  # no step was left: the run had come to its end before


@dataclass(kw_only=True, slots=True)
class _Duties:
    """What has to be done after a step: lines, measurements, checkpoints."""

    recipe: Recipe
    rhythm: Rhythm
    journal: RunJournal
    checkpoints: Checkpoints
    predict: Callable[[Weights, Rows], np.ndarray]
    held_out: Mapping[str, Rows]
    say: Callable[[str], None]
    since_line: list[Taken] = field(default_factory=list)  # the steps since the last line
    saved_s: float = field(default_factory=time.monotonic)

    def after(self, step: int, state: TrainState, taken: Taken, *, is_end: bool) -> None:
        """Does what is due after a step; a run that ends writes a line and a checkpoint."""
        self.since_line.append(taken)
        if step % self.rhythm.steps_per_line == 0 or is_end:
            self._tell(step)
        if step % self.rhythm.steps_per_measurement == 0 or step == self.recipe.num_steps:
            self._measure(step, state.weights)
        is_due = time.monotonic() - self.saved_s >= self.rhythm.seconds_per_checkpoint
        if is_due or is_end or step in self.recipe.averaged:
            self.checkpoints.save(step, _parts(state))
            self.saved_s = time.monotonic()

    def _tell(self, step: int) -> None:
        record = summarise(self.recipe, step, self.since_line)
        self.journal.append(record)
        self.say(line(record))
        self.since_line.clear()

    def _measure(self, step: int, weights: Weights) -> None:
        found = measure(lambda rows: self.predict(weights, rows), self.held_out)
        for record in accuracy_records(step, found):
            self.journal.append(record)
        self.say(accuracy_line(step, found))


def _resume(state: TrainState, checkpoints: Checkpoints, mesh: Mesh, say: Callable[[str], None]) -> TrainState:
    """The state of the last checkpoint that can be read; where there is none, the given one."""
    found = checkpoints.restore_newest(_parts(state), say)
    if found is None:
        return state
    parts = jax.device_put(found, replicated(mesh))
    return TrainState(weights=parts[WEIGHTS], **parts["progress"])


def _parts(state: TrainState) -> dict[str, Any]:
    """The state with its weights separate, so that they can be read alone."""
    return {WEIGHTS: state.weights, "progress": {"optimiser": state.optimiser, "step": state.step}}


@contextmanager
def _steps(
    recipe: Recipe, model: LatentModel, lessons: Lessons, mesh: Mesh, state: TrainState
) -> Generator[Iterator[tuple[int, TrainState, Taken]]]:
    """The steps that are left, each run when it is asked for: how many are done, the state, how the step went.

    A state is taken over by the next step.
    """
    program = build_step(recipe, model, mesh)
    first = int(state.step)

    def each(rows_of_steps: Iterator[Rows], state: TrainState) -> Iterator[tuple[int, TrainState, Taken]]:
        for step in range(first, recipe.num_steps):
            started_s = time.monotonic()
            rows = next(rows_of_steps)
            waited_s = time.monotonic() - started_s
            state, report = program(state, place(rows, mesh))
            report = jax.device_get(report)
            yield step + 1, state, Taken(report=report, seconds=time.monotonic() - started_s, waited_s=waited_s)

    with _made_ahead(recipe, lessons, first) as rows_of_steps:
        yield each(rows_of_steps, state)


@contextmanager
def _made_ahead(recipe: Recipe, lessons: Lessons, first: int) -> Generator[Iterator[Rows]]:
    """The rows of each step from `first` on, made in a thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="lessons")

    def submit(step: int) -> Future[Rows]:
        return pool.submit(lessons.rows, recipe.stage_of(step), step)

    def each() -> Iterator[Rows]:
        steps = range(first, recipe.num_steps)
        waiting = [submit(step) for step in steps[:NUM_STEPS_AHEAD]]
        for step in steps:
            if step + NUM_STEPS_AHEAD < recipe.num_steps:
                waiting.append(submit(step + NUM_STEPS_AHEAD))
            yield waiting.pop(0).result()

    try:
        yield each()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
