"""One stage of a worker: consecutive layers on a mesh of their own, with their pages and their compiled programs.

A worker without a pipeline is one stage, the first and the last at once. The first turns tokens into activations; the
last draws the next tokens and holds the slots' state. What its programs are, `compiled.blueprint` says; what goes from
one stage to the next is `engine.programs`'.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.steps import GUESS_AFTER, ProgramKey, StepKind
from moonshard.sharding.mesh import placed

_DRAWS = (StepKind.DRAW, StepKind.ACCEPT)
_NOTE, _LOAD, _COPY = ((kind, 0) for kind in (StepKind.NOTE, StepKind.LOAD, StepKind.COPY))


class Stage:
    """A blueprint with its weights, its state and its programs. Methods enqueue work and return without waiting for it.

    `programs` may change meanwhile. One that was not prepared is compiled by its first launch.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        weights: Any,
        programs: Mapping[ProgramKey, Callable[..., Any]],
        draft_weights: Any = None,
    ):
        """`draft_weights`: of the part's draft model, with the tables that it borrows."""
        self.blueprint = blueprint
        self._draft_weights = draft_weights
        self._features: jax.Array | None = None  # for the draft model, of the step before
        self.shards = blueprint.shards
        self.weights = weights
        self.programs = programs
        self.state = blueprint.empty_state()
        self._any_token = {kind: _any_token(blueprint, kind) for kind in _DRAWS if (kind, 0) in blueprint.keys}

    def run(self, kind: StepKind, bucket: int, packed: np.ndarray, hidden: jax.Array | None) -> jax.Array:
        """A prefill, a decode or a verification.

        Returns the activations; of a decode or a verification the last stage gives a number instead, that is ready once
        it has run. `hidden` are the activations of the stage before, on this one's mesh; None on the first.
        """
        before = () if hidden is None else (hidden,)
        state, program = self.state, self.programs[kind, bucket]
        given = (self.weights, state.pages, state.logits, state.last_token, packed, *before)
        pages, logits, result, self._features = program(*given)
        self.state = state._replace(pages=pages, logits=logits)
        return result

    def guess(
        self, kind: StepKind, bucket: int, packed: np.ndarray, guessing: np.ndarray, draws: jax.Array | None
    ) -> jax.Array:
        """What the draft model makes of the step before: [partitions x slots, guesses], in the order of its draws.

        `kind`, `packed` and `draws`: of that step; `guessing`: the packed guesses' own.
        """
        drawn = self.state.last_token if kind is StepKind.PREFILL else draws
        given = (self._draft_weights, self.state.pages, drawn, self._features, packed, guessing)
        pages, guesses = self.programs[GUESS_AFTER[kind], bucket](*given)
        self._features, self.state = None, self.state._replace(pages=pages)
        return guesses

    def draw(
        self, kind: StepKind, packed: np.ndarray, allowed: np.ndarray | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """On the last stage: the packed draws of all partitions, from what the step before left.

        Where another stage embeds them also the rows' newest tokens, for its `note`. `kind`: of the draws. `allowed`:
        as `DrawMasks` gives them, for rows that are masked; None where none is.
        """
        state, masks = self.state, self._any_token[kind] if allowed is None else allowed
        given = (state.slots, state.last_token, state.logits, packed, masks)
        slots, last_token, drawn, newest = self.programs[kind, 0](*given)
        self.state = state._replace(slots=slots, last_token=last_token)
        return drawn, newest

    def score(self, bucket: int, packed: np.ndarray, rows: jax.Array) -> jax.Array:
        """On the last stage: the packed scores of all partitions, from the rows that a prefill of that bucket gave."""
        return self.programs[StepKind.SCORE, bucket](self.weights, packed, rows)

    def note(self, packed: np.ndarray, newest: jax.Array) -> None:
        """On the first stage: what the last one drew becomes the input of the slots' next decode step.

        `newest`: on this stage's mesh.
        """
        self.state = self.state._replace(last_token=self.programs[_NOTE](self.state.last_token, packed, newest))

    def load(self, packed: np.ndarray) -> None:
        state = self.state
        if (program := self.programs.get(_LOAD)) is not None:  # a stage in the middle keeps nothing of a slot
            slots, last_token = program(state.slots, state.last_token, packed)
            self.state = state._replace(slots=slots, last_token=last_token)

    def copy(self, packed: np.ndarray) -> None:
        self.state = self.state._replace(pages=self.programs[_COPY](self.state.pages, packed))

    def export(self, bucket: int, packed: np.ndarray) -> jax.Array:
        """This stage's layers of blocks, still on the devices, for `shards.collect`."""
        return self.programs[StepKind.EXPORT, bucket](self.state.pages, packed)

    def land(self, bucket: int, packed: np.ndarray, blocks: np.ndarray | jax.Array, partition: int) -> jax.Array:
        """`blocks` are this stage's layers of them, as `shards.spread` takes them.

        Returns a number that is ready once they have landed.
        """
        payload = self.shards.spread(blocks, partition)
        pages, done = self.programs[StepKind.LAND, bucket](self.state.pages, packed, payload)
        self.state = self.state._replace(pages=pages)
        return done


def _any_token(blueprint: Blueprint, kind: StepKind) -> jax.Array:
    """Masks that allow everything, where the draws find them whose rows are not masked."""
    shape = blueprint.any_token(kind)
    return placed(np.full(shape.shape, np.iinfo(np.uint32).max, np.uint32), blueprint.by_partition)
