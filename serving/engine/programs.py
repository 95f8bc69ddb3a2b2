"""The device side of a worker: its stages, one after another, and the steps that run through them.

Activations go from stage to stage, and the tokens that the last one draws back to the first, by `sharding.crossing`.
None of it waits, so that while one stage runs a step the one before it runs the next. The first stage takes drawn
tokens only when a step of the same slots is launched: else its state would depend on the last stage's newest step, and
so would every step that it runs. Where stages lie in several processes, each of them runs its own part of every step,
and all run the same steps in the same order. Of each kind the largest bucket, which serves every step, is prepared
before the worker is ready, and the others behind it: a step takes the smallest that is there, and what it would rather
have had is noted. No scheduler object comes here.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from moonshard.serving.control.request import MAX_LOGPROBS, Logprobs
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.compiled.bodies import INPUTS
from moonshard.serving.engine.compiled.prepared import PreparedPrograms
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.draws import DRAWN_COLUMNS
from moonshard.serving.engine.scoring.prompts import scored_rows
from moonshard.serving.engine.stage import Stage
from moonshard.serving.engine.steps import ProgramKey, Step, StepKind, StepShapes
from moonshard.sharding.crossing import Crossing, Turns, crossing

type Slots = frozenset[tuple[int, int]]  # as (partition, slot)
NO_DRAWS = np.zeros((0, DRAWN_COLUMNS), np.int32)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight, and what it gives, still on the devices.

    For a step with draws, the packed draws, where the last stage is; for one without, what is ready once the step has
    run. For an export its blocks, by stage; for a land, by stage, a number that is ready once the blocks have landed.
    Nothing for the kinds whose end nobody waits for.
    """

    step: Step
    results: tuple[jax.Array, ...]
    scores: jax.Array | None = None  # packed, where a prompt is scored
    guesses: jax.Array | None = None  # of a draft model, for each row of the draws


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's tokens on the host, in the order in which its plan names who draws.

    Of a row's `q_len` tokens the first `num_emitted` are the sequence's; the rest means nothing.
    """

    num_emitted: np.ndarray  # [rows] int32
    tokens: np.ndarray  # [rows, q_len] int32
    logprobs: np.ndarray  # [rows, q_len] f32
    top_ids: np.ndarray  # [rows, q_len, top] int32
    top_logprobs: np.ndarray  # [rows, q_len, top] f32
    scores: np.ndarray | None = None  # packed, of the scored chunks' rows one after another
    guesses: np.ndarray | None = None  # [rows, guesses] int32: what a draft model takes to follow

    def logprobs_of(self, row: int, index: int, num_top: int) -> Logprobs:
        """The log-probabilities of the `index`-th token of a row."""
        ids, values = self.top_ids[row, index, :num_top].tolist(), self.top_logprobs[row, index, :num_top].tolist()
        return Logprobs(chosen=float(self.logprobs[row, index]), top=tuple(zip(ids, values, strict=True)))


@dataclass(frozen=True, slots=True)
class _Due:
    """Draws that the first stage has not taken yet, and their slots."""

    slots: Slots
    sampling: np.ndarray  # of the step that drew them
    newest: jax.Array | None  # of each row, where the last stage is


class Programs:
    """The stages of a worker, on which a device thread runs steps. All of them have the same shapes of steps.

    `onward` is, of each stage but the last, how its activations come to the next one, by the step that has them.
    """

    def __init__(self, prepared: PreparedPrograms, stages: Sequence[Stage]):
        """`stages`: those that have devices of this process. A crossing to or from another is compiled here."""
        self.prepared = prepared
        self.shapes = prepared.shapes
        self.stages = tuple(stages)
        blueprints, here = prepared.blueprints, iter(stages)
        self._all = [next(here) if blueprint.is_here else None for blueprint in blueprints]
        turns: Turns = {}
        first, last = blueprints[0], blueprints[-1]
        self.onward = [_onward(before, after, turns) for before, after in itertools.pairwise(blueprints)]
        self._back = crossing(last.part.mesh, first.part.mesh, first.newest, turns)
        ends = list(itertools.accumulate(stage.blueprint.num_page_layers for stage in stages))
        self._layers = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._layouts = {key: self.shapes.layout(*key) for key in ((StepKind.LOAD, 0), (StepKind.DRAW, 0))}
        self._due: list[_Due] = []  # at most one for each slot, oldest first

    @classmethod
    def of(
        cls, parts: Sequence[StageModel], shapes: StepShapes, *, blocks_per_partition: int, block_size: int, dtype: str
    ) -> "Programs":
        """Stages whose weights are there, with pages of their own; none of their programs is prepared."""
        sizes = {"blocks_per_partition": blocks_per_partition, "block_size": block_size}
        prepared = PreparedPrograms(shapes, [Blueprint(part, shapes, **sizes, dtype=dtype) for part in parts])
        built = zip(prepared.blueprints, parts, strict=True)
        drafts = [None if part.draft is None else part.draft.weights for part in parts]
        stages = [Stage(b, part.weights, prepared.of(i), drafts[i]) for i, (b, part) in enumerate(built)]
        return cls(prepared, stages)

    @property
    def num_stages(self) -> int:
        """Of the worker, wherever they are."""
        return len(self._all)

    @property
    def has_last(self) -> bool:
        """Whether the last stage, which draws, is here."""
        return self._all[-1] is not None

    def launch(self, step: Step) -> Launched:
        """Enqueues a step and returns without waiting for it; before its draws it waits for what their masks need."""
        match step.kind:
            case StepKind.PREFILL | StepKind.DECODE | StepKind.VERIFY:
                return self._run(step)
            case StepKind.EXPORT:
                return Launched(step, tuple(stage.export(step.bucket, step.metadata) for stage in self.stages))
            case StepKind.LAND:
                assert step.payload is not None  # as the encoder makes them
                return Launched(step, tuple(self._land(step, step.payload)))
            case StepKind.LOAD | StepKind.COPY:
                self._note_due(self._slots(step))
                for stage in self.stages:
                    (stage.load if step.kind is StepKind.LOAD else stage.copy)(step.metadata)
                return Launched(step, ())
            case (
                StepKind.DRAW
                | StepKind.ACCEPT
                | StepKind.NOTE
                | StepKind.SCORE
                | StepKind.GUESS_PREFILL
                | StepKind.GUESS_DECODE
                | StepKind.GUESS_VERIFY
            ):
                raise ValueError(f"{step.kind} is no step of its own")

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        """Waits for a step's tokens, or an export's blocks, or the end of a land. None where there is nothing to see.

        The blocks are an array of their own, which no later step changes. From a single CPU device it is the device's
        own memory, not copied again.
        """
        step, results = launched.step, launched.results
        match step.kind:
            case StepKind.PREFILL | StepKind.DECODE if step.sampling is not None:
                return _with_others(_drawn(_rows(np.asarray(results[0]), step.draws)), launched)
            case StepKind.PREFILL if step.scoring is not None:
                return _with_others(_drawn(NO_DRAWS), launched)
            case StepKind.VERIFY:
                return _with_others(_accepted(_rows(np.asarray(results[0]), step.draws)), launched)
            case StepKind.EXPORT:
                collected = zip(self.stages, results, strict=True)
                parts = [stage.shards.collect(result, step.partition) for stage, result in collected]
                return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
            case _:
                jax.block_until_ready(results)
                return None

    def _run(self, step: Step) -> Launched:
        """Runs a step through all stages, then what follows on the last: scores, draws, a draft model's guesses."""
        slots = self._slots(step)
        self._note_due(slots)
        result, last = self._through_all(step), self._all[-1]
        if last is None:
            self._expect_draws(step, slots, None)
            return Launched(step, (result,))
        scores = None if step.scoring is None else last.score(step.bucket, step.scoring, result)
        draws = None if step.sampling is None else self._draw(last, step, step.sampling, slots)
        guesses = None
        if step.guessing is not None:
            guesses = last.guess(step.kind, step.bucket, step.metadata, step.guessing, draws)
        return Launched(step, (result if draws is None else draws,), scores, guesses if step.num_ahead else None)

    def _through_all(self, step: Step) -> jax.Array:
        """What the last stage gives; or, where that is elsewhere, what is ready once this process has done its part."""
        result = None
        for stage, onward in itertools.zip_longest(self._all, self.onward):
            if stage is not None:
                result = stage.run(step.kind, step.bucket, step.metadata, result)
            if onward is not None:
                result = onward[step.kind, step.bucket](result)
        assert result is not None  # there is a stage
        return result

    def _draw(self, last: Stage, step: Step, sampling: np.ndarray, slots: Slots) -> jax.Array:
        """The packed draws."""
        kind = StepKind.ACCEPT if step.kind is StepKind.VERIFY else StepKind.DRAW
        masks = None if step.allowed is None else step.allowed()
        draws, newest = last.draw(kind, sampling, masks)
        self._expect_draws(step, slots, newest)
        return draws

    def _expect_draws(self, step: Step, slots: Slots, newest: jax.Array | None) -> None:
        """The first stage will have to take what was drawn for these slots. There are none with a single stage."""
        if step.sampling is not None and slots:
            self._due.append(_Due(slots, step.sampling[:, : self._layouts[StepKind.DRAW, 0].size], newest))

    def _slots(self, step: Step) -> Slots:
        """The slots whose next input token the step reads or writes; none where a single stage draws and reads it."""
        if self.num_stages == 1:
            return frozenset()
        if step.kind is StepKind.LOAD:
            slots = self._layouts[StepKind.LOAD, 0].views(step.metadata)["slot"]
        elif step.sampling is not None:
            slots = self._layouts[StepKind.DRAW, 0].views(step.sampling)["sample_slot"]  # as of ACCEPT
        else:
            return frozenset()
        slots = slots.reshape(len(step.metadata), -1)
        partitions, rows = (slots < self.shapes.slots_per_partition).nonzero()
        return frozenset(zip(partitions.tolist(), slots[partitions, rows].tolist(), strict=True))

    def _note_due(self, slots: Slots) -> None:
        """Before a step of these slots, lets the first stage take what was drawn for them, and every older draw."""
        last = max((index for index, due in enumerate(self._due) if due.slots & slots), default=-1)
        for due in self._due[: last + 1]:
            newest, first = self._back(due.newest), self._all[0]
            if first is not None:
                assert newest is not None  # there
                first.note(due.sampling, newest)
        del self._due[: last + 1]

    def _land(self, step: Step, payload: np.ndarray) -> list[jax.Array]:
        return [
            stage.land(step.bucket, step.metadata, payload[:, layers], step.partition)
            for stage, layers in zip(self.stages, self._layers, strict=True)
        ]


def _onward(before: Blueprint, after: Blueprint, turns: Turns) -> dict[ProgramKey, Crossing]:
    """How activations come from a stage to the next, by the step that has them."""
    sizes = {key: after.stream(*key) for key in after.shapes.programs if key[0] in INPUTS}
    return {key: crossing(before.part.mesh, after.part.mesh, size, turns) for key, size in sizes.items()}


def _with_others(drawn: Drawn, launched: Launched) -> Drawn:
    """With the prompts' scores and a draft model's guesses, where the step has them."""
    step, scores, guesses = launched.step, launched.scores, launched.guesses
    return replace(
        drawn,
        scores=None if scores is None else scored_rows(step, scores),
        guesses=None if guesses is None else _rows(np.asarray(guesses), step.draws)[:, : step.num_ahead],
    )


def _drawn(packed: np.ndarray) -> Drawn:
    """The tokens of a stage's draws, one for each row: views of `packed` [rows, columns]."""
    return _unpacked(packed[:, None], np.ones(len(packed), np.int32))


def _accepted(packed: np.ndarray) -> Drawn:
    """The tokens of a verification: in front of those of each position stands how many of them count."""
    return _unpacked(packed[:, 1:].reshape(len(packed), -1, DRAWN_COLUMNS), packed[:, 0])


def _unpacked(words: np.ndarray, num_emitted: np.ndarray) -> Drawn:
    """Of `words` [rows, positions, columns]."""
    top, floats = MAX_LOGPROBS, words.view(np.float32)
    return Drawn(
        num_emitted=num_emitted,
        tokens=words[..., 0],
        logprobs=floats[..., 1],
        top_ids=words[..., 2 : 2 + top],
        top_logprobs=floats[..., 2 + top :],
    )


def _rows(draws: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
    """The rows of the draws in the order of `rows`. Of one partition they are the first ones, and not copied."""
    return draws[: len(rows)] if rows == tuple(range(len(rows))) else draws[list(rows)]
