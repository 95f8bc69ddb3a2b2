"""The programs of a worker: which of them are there, and so which bucket a step takes.

Apart from the stages that run them, since programs are made while there is no weight and no page yet. Of each kind the
largest bucket, which serves every step, is prepared before the worker is ready, and the others behind it: a step takes
the smallest that is there, and what it would rather have had is noted. Guesses are verified once there is a program for
so few rows: a worker is no later ready for them. How programs are made is `compiled.preparation`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.steps import GUESS_AFTER, STEP_BEFORE, ProgramKey, StepKind, StepShapes, smallest

_DECODES = (StepKind.DECODE, StepKind.VERIFY)
_VERIFYING = (StepKind.VERIFY, StepKind.GUESS_VERIFY, StepKind.ACCEPT)  # without them every token is served, too
MIN_ASKED = 3  # a size that comes once is no reason to compile for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A program of a stage, still to be prepared."""

    stage: int
    key: ProgramKey
    blueprint: Blueprint
    is_needed: bool  # before anything can be served


class PreparedPrograms:
    """The programs of all stages. A launch of one that was not taken compiles it."""

    def __init__(self, shapes: StepShapes, blueprints: Sequence[Blueprint]):
        self.shapes = shapes
        self.blueprints = tuple(blueprints)
        self._by_stage: tuple[dict[ProgramKey, Callable[..., Any]], ...] = tuple(
            {key: blueprint.program(key) for key in blueprint.keys} for blueprint in blueprints
        )
        self._ready = self._sizes = shapes.buckets
        self._taken: set[tuple[int, ProgramKey]] = set()
        self._taking = threading.Lock()
        self._num_asked: Counter[ProgramKey] = Counter()
        self._on_missing: Callable[[ProgramKey], None] = lambda key: None

    def of(self, stage: int) -> Mapping[ProgramKey, Callable[..., Any]]:
        """A stage's programs by their keys, always as they are now."""
        return self._by_stage[stage]

    @property
    def needed(self) -> tuple[Wanted, ...]:
        """The programs without which nothing is served: the largest of each kind, in the order of
        `StepShapes.programs`.
        """
        return tuple(wanted for wanted in self._wanted() if wanted.is_needed)

    @property
    def others(self) -> tuple[Wanted, ...]:
        """The programs that only serve smaller steps faster; the smallest first, of each kind in turn."""
        others = [wanted for wanted in self._wanted() if not wanted.is_needed]
        return tuple(sorted(others, key=lambda wanted: self._buckets_of(wanted.key[0]).index(wanted.key[1])))

    @property
    def firsts(self) -> tuple[Wanted, ...]:
        """Of `others` those that serve a short first request: a prefill of one row, and the smallest decodes."""
        q_tile, decodes = self.shapes.q_tile, self.shapes.decode_buckets
        short = [(StepKind.PREFILL, q_tile), *((kind, decodes[0]) for kind in _DECODES if decodes)]
        keys = {(kind, size) for own, size in short for kind in (own, GUESS_AFTER[own])} | {(StepKind.ACCEPT, 0)}
        return tuple(wanted for wanted in self.others if wanted.key in keys)

    def _wanted(self) -> Iterator[Wanted]:
        for index, blueprint in enumerate(self.blueprints):
            for key in blueprint.keys:
                kind, bucket = key
                is_needed = kind not in _VERIFYING and bucket == self._buckets_of(kind)[-1]
                yield Wanted(stage=index, key=key, blueprint=blueprint, is_needed=is_needed)

    def _buckets_of(self, kind: StepKind) -> tuple[int, ...]:
        return self.shapes.buckets.get(kind, (0,))

    def only_needed(self) -> None:
        """From now on a step takes the largest bucket of its kind, until smaller programs have been taken; and nothing
        is verified until there is what verifies.
        """
        self._ready = {kind: () if kind in _VERIFYING else sizes[-1:] for kind, sizes in self.shapes.buckets.items()}

    def tell_missing(self, on_missing: Callable[[ProgramKey], None]) -> None:
        """From now on `on_missing` is told, on the thread that makes steps, of missing programs that steps could
        use.
        """
        self._on_missing = on_missing

    def has(self, wanted: Wanted) -> bool:
        """Whether the program was taken."""
        return (wanted.stage, wanted.key) in self._taken

    def take(self, wanted: Wanted, program: Callable[..., Any]) -> None:
        """Takes a prepared program, from any thread. Steps of its bucket are made once every stage has its own."""
        self._by_stage[wanted.stage][wanted.key] = program
        kind, bucket = wanted.key
        with self._taking:
            self._taken.add((wanted.stage, wanted.key))
            is_for_all = kind is StepKind.ACCEPT  # of whatever bucket was verified
            kind = StepKind.VERIFY if is_for_all else STEP_BEFORE.get(kind, kind)
            if kind in self._ready:
                buckets = self._sizes[kind] if is_for_all else (bucket,)
                whole = {bucket for bucket in buckets if self._is_whole(kind, bucket)}
                self._ready |= {kind: tuple(sorted({*self._ready[kind], *whole}))}

    def _is_whole(self, kind: StepKind, bucket: int) -> bool:
        """Whether every stage has its program, and what guesses or draws behind it where something does."""
        keys = self._keys_of(kind, bucket)
        return all(
            (index, key) in self._taken for index, own in enumerate(self._by_stage) for key in keys if key in own
        )

    def _keys_of(self, kind: StepKind, bucket: int) -> tuple[ProgramKey, ...]:
        """All that a step of this bucket runs of its own."""
        guess = GUESS_AFTER.get(kind)
        guesses = () if guess not in self._sizes else ((guess, bucket),)
        accepts = ((StepKind.ACCEPT, 0),) if kind is StepKind.VERIFY else ()
        return ((kind, bucket), *guesses, *accepts)

    def can_verify(self, num_rows: int) -> bool:
        """Whether guesses of so many rows of a partition can be verified. If not, it is told as in `bucket_for`: to be
        asked once a step.
        """
        ready, sizes = self._ready[StepKind.VERIFY], self._sizes[StepKind.VERIFY]
        if ready and ready[-1] >= num_rows:
            return True
        self._ask_for(StepKind.VERIFY, smallest(sizes, num_rows))
        return False

    def bucket_for(self, kind: StepKind, size: int) -> int:
        """The smallest bucket that is there and holds `size`.

        A smaller one that is missing is told once (`tell_missing`), after it would have served `MIN_ASKED` steps.
        """
        ready, sizes = self._ready[kind], self._sizes[kind]
        bucket = smallest(ready, size)
        if len(ready) == len(sizes):  # all are there
            return bucket
        best = smallest(sizes, size)
        if best < bucket:
            self._ask_for(kind, best)
        return bucket

    def _ask_for(self, kind: StepKind, bucket: int) -> None:
        self._num_asked[kind, bucket] += 1
        if self._num_asked[kind, bucket] == MIN_ASKED:
            for key in self._keys_of(kind, bucket):
                self._on_missing(key)

    def compile(self) -> None:
        """Every program, one after another, with nothing kept: for benches and tests."""
        for wanted in (*self.needed, *self.others):
            self.take(wanted, wanted.blueprint.lower(wanted.key).compile())
