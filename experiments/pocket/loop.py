"""The run: step after step, telling how it goes, saving what it has, going on where it was killed.

The next rows are made in a thread while the devices work. Whoever starts it decides what stops it: `is_stopping` is
asked after every step, and a checkpoint is the last thing a stopped run does.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from moonshard.experiments.pocket.journal import Journal, tell
from moonshard.experiments.pocket.measure import measure
from moonshard.experiments.pocket.progress import Taken, accuracy_line, accuracy_records, line, summarise
from moonshard.experiments.pocket.recipe import Lessons, Recipe, Rows, RunFailed
from moonshard.experiments.pocket.state import Checkpoints
from moonshard.experiments.pocket.step import TrainState, build_predict, build_step, first_state, place
from moonshard.models.kimi import KimiConfig
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

NUM_STEPS_AHEAD = 2  # whose rows are made before they are asked for
CHECKPOINTS = "checkpoints"  # in a run's folder
WEIGHTS = "weights"  # in a checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Rhythm:
    """How often a run does what is not training."""

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
        RunFailed: the folder cannot be written, or holds a run of another kind.
    """
    config, mesh = KimiConfig.from_hugging_face(shape), build_mesh(MeshShape(data=jax.device_count()))
    _create(folder)
    tell(folder, recipe, shape)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    state = _resume(first_state(recipe, config, mesh, lessons.alike()), checkpoints, mesh)
    first = int(state.step)
    say(f"{recipe.num_steps} steps, {recipe.num_tokens:,} tokens, on {mesh.size} device(s); {first} steps are done")
    journal = Journal(folder, first)
    held_out = lessons.held_out()
    predict = build_predict(recipe, config, mesh)
    taken: list[Taken] = []
    saved_s = time.monotonic()
    with _steps(recipe, config, lessons, mesh, state) as steps:
        for step, state, each in steps:
            taken.append(each)
            is_last = step == recipe.num_steps
            is_end = is_last or is_stopping()
            if step % rhythm.steps_per_line == 0 or is_end:
                record = summarise(recipe, step, taken)
                journal.append(record)
                say(line(record))
                taken.clear()
            if is_end or time.monotonic() - saved_s >= rhythm.seconds_per_checkpoint:
                checkpoints.save(step, _parts(state))
                saved_s = time.monotonic()
            if step % rhythm.steps_per_measurement == 0 or is_last:
                found = measure(lambda rows, weights=state.weights: predict(weights, rows), held_out)
                for record in accuracy_records(step, found):
                    journal.append(record)
                say(accuracy_line(step, found))
            if is_end:
                return step
    return first


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFailed(f"{folder}: {error.strerror or error}") from error


def _resume(state: TrainState, checkpoints: Checkpoints, mesh: Mesh) -> TrainState:
    step = checkpoints.newest()
    if step is None:
        return state
    parts = jax.device_put(checkpoints.restore(step, _parts(state)), replicated(mesh))
    return TrainState(weights=parts[WEIGHTS], **parts["progress"])


def _parts(state: TrainState) -> dict[str, Any]:
    """Weights apart, so that they can be taken out alone."""
    return {WEIGHTS: state.weights, "progress": {"optimiser": state.optimiser, "step": state.step}}


@contextmanager
def _steps(
    recipe: Recipe, config: KimiConfig, lessons: Lessons, mesh: Mesh, state: TrainState
) -> Generator[Iterator[tuple[int, TrainState, Taken]]]:
    """The steps that are left, each taken when it is asked for: how many are done, the state, what it took.

    A state is taken over by the next step.
    """
    program = build_step(recipe, config, mesh)
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
