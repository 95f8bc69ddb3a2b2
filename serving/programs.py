"""The device side of a worker: its stages, one after another, and the steps that run through them.

Activations go from stage to stage, and the tokens that the last one draws back to the first, by `device_put`. None of
it waits, so that while one stage runs a step the one before it runs the next. The first stage takes drawn tokens only
when a step of the same slots is launched: else its state would depend on the last stage's newest step, and so would
every step that it runs. Programs are compiled for every bucket before the worker is ready; nothing compiles afterwards.
No scheduler object comes here.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from moonshard.serving.request import Logprobs
from moonshard.serving.stage import Stage
from moonshard.serving.steps import Step, StepKind, StepShapes


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight, and what it gives, still on the devices.

    The packed draws; an export's blocks, by stage; of a land, by stage, a number that is ready once the blocks have
    landed. Nothing for the kinds whose end nobody waits for.
    """

    step: Step
    results: tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's tokens on the host, in the order in which its plan names who draws."""

    tokens: np.ndarray  # [rows] int32
    logprobs: np.ndarray  # [rows] f32
    top_ids: np.ndarray  # [rows, top] int32
    top_logprobs: np.ndarray  # [rows, top] f32

    def logprobs_of(self, row: int, num_top: int) -> Logprobs:
        top = zip(self.top_ids[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist(), strict=True)
        return Logprobs(chosen=float(self.logprobs[row]), top=tuple(top))


@dataclass(frozen=True, slots=True)
class _Due:
    """Draws that the first stage has not taken yet, and the slots that they are for, each as (partition, slot)."""

    slots: frozenset[tuple[int, int]]
    step: Step
    draws: jax.Array


class Programs:
    """What a device thread runs steps on. All `stages` have the same shapes of steps."""

    def __init__(self, shapes: StepShapes, stages: Sequence[Stage]):
        self.shapes = shapes
        self.stages = tuple(stages)
        ends = list(itertools.accumulate(len(stage.model.layers) for stage in stages))
        self._layers = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._layouts = {key: shapes.layout(*key) for key in shapes.programs}
        self._due: list[_Due] = []  # at most one for each slot, oldest first

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Runs every program once on padding, which compiles it, or loads it from the persistent cache."""
        programs = self.shapes.programs
        for done, (kind, bucket) in enumerate(programs):
            progress(done, len(programs))
            packed, _ = self.shapes.layout(kind, bucket).blank(self.shapes.num_partitions)
            payload = self._blank_payload(bucket) if kind is StepKind.LAND else None
            launched = self.launch(Step(-1, kind, bucket, packed, payload=payload))
            if kind in (StepKind.PREFILL, StepKind.DECODE) and len(self.stages) > 1:
                self.stages[0].note(kind, bucket, packed, launched.results[0])
            self.fetch(launched)
        progress(len(programs), len(programs))
        jax.block_until_ready([stage.state for stage in self.stages])

    def launch(self, step: Step) -> Launched:
        """Enqueues a step and returns without waiting for it."""
        match step.kind:
            case StepKind.PREFILL | StepKind.DECODE:
                return Launched(step, (self._run(step),))
            case StepKind.EXPORT:
                return Launched(step, tuple(stage.export(step.bucket, step.metadata) for stage in self.stages))
            case StepKind.LAND:
                assert step.payload is not None  # as the encoder makes them
                return Launched(step, tuple(self._land(step, step.payload)))
            case StepKind.LOAD | StepKind.COPY:
                self._note_due(self._slots(step))
                for stage in self.stages:
                    stage.change(step.kind, step.metadata)
                return Launched(step, ())

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        """Waits for a step's tokens, or an export's blocks, or the end of a land. None where there is nothing to see.

        The blocks are an array of their own, which no later step changes. From a single CPU device it is the device's
        own memory, not copied again.
        """
        step, results = launched.step, launched.results
        match step.kind:
            case StepKind.PREFILL | StepKind.DECODE:
                return _drawn(np.asarray(results[0])[list(step.draws)])
            case StepKind.EXPORT:
                collected = zip(self.stages, results, strict=True)
                parts = [stage.shards.collect(result, step.partition) for stage, result in collected]
                return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
            case _:
                jax.block_until_ready(results)
                return None

    def _run(self, step: Step) -> jax.Array:
        """A prefill or a decode, through all stages. Returns the packed draws."""
        slots = self._slots(step)
        self._note_due(slots)
        result = None
        for stage in self.stages:
            result = stage.run(step.kind, step.bucket, step.metadata, result)
        assert result is not None  # there is a stage
        if slots:
            self._due.append(_Due(slots, step, result))
        return result

    def _slots(self, step: Step) -> frozenset[tuple[int, int]]:
        """The slots whose next input token the step reads or writes; none where a single stage draws and reads it."""
        name = _SLOTS.get(step.kind)
        if len(self.stages) == 1 or name is None:
            return frozenset()
        slots = self._layouts[step.kind, step.bucket].views(step.metadata)[name].reshape(len(step.metadata), -1)
        partitions, rows = (slots < self.shapes.slots_per_partition).nonzero()
        return frozenset(zip(partitions.tolist(), slots[partitions, rows].tolist(), strict=True))

    def _note_due(self, slots: frozenset[tuple[int, int]]) -> None:
        """Before a step of these slots, let the first stage take what was drawn for them, and all that is older."""
        last = max((index for index, due in enumerate(self._due) if due.slots & slots), default=-1)
        for due in self._due[: last + 1]:
            self.stages[0].note(due.step.kind, due.step.bucket, due.step.metadata, due.draws)
        del self._due[: last + 1]

    def _land(self, step: Step, payload: np.ndarray) -> list[jax.Array]:
        return [
            stage.land(step.bucket, step.metadata, payload[:, layers], step.partition)
            for stage, layers in zip(self.stages, self._layers, strict=True)
        ]

    def _blank_payload(self, bucket: int) -> np.ndarray:
        pages = self.stages[0].state.pages
        _, _, *token = pages.shape
        return np.zeros((bucket, self._layers[-1].stop, *token), pages.dtype)


_SLOTS = {StepKind.PREFILL: "sample_slot", StepKind.DECODE: "slot", StepKind.LOAD: "slot"}  # names of fields


def _drawn(packed: np.ndarray) -> Drawn:
    top = (packed.shape[1] - 2) // 2
    return Drawn(
        tokens=packed[:, 0],
        logprobs=np.ascontiguousarray(packed[:, 1]).view(np.float32),
        top_ids=packed[:, 2 : 2 + top],
        top_logprobs=np.ascontiguousarray(packed[:, 2 + top :]).view(np.float32),
    )
