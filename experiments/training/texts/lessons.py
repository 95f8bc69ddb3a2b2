"""The corpus as the trainer asks for it: rows by stage and step, and the fixed held-out rows of each skill."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from moonshard.experiments.training.run.recipe import Rows, TrainingStage
from moonshard.experiments.training.shape import NUM_RANKS
from moonshard.experiments.training.texts.conversation import HELD_OUT, TRAIN, random_of
from moonshard.experiments.training.texts.corpus import SKILLS, Text, batch, lesson, stacked

NUM_HELD_OUT_ROWS = 16  # of a skill
NUM_HELD_OUT_TOKENS = 512


class PocketLessons:
    """Generated conversations, rendered and cut into rows."""

    def __init__(self, text: Text, seed: int):
        self._text, self._seed = text, seed

    def rows(self, stage: TrainingStage, step: int) -> Rows:
        return batch(TRAIN, self._seed, step, stage, self._text)

    def alike(self) -> Sequence[tuple[int, int]]:
        """Pairs of a word behind a space and the same word without one."""
        ids = {self._text.tokenizer.decode([token]): token for token in range(NUM_RANKS)}
        return [(token, ids[text[1:]]) for text, token in ids.items() if text.startswith(" ") and text[1:] in ids]

    def held_out(self) -> Mapping[str, Rows]:
        return self._held_out

    @cached_property
    def _held_out(self) -> Mapping[str, Rows]:
        return {skill: self._rows_of(skill) for skill in SKILLS}

    def _rows_of(self, skill: str) -> Rows:
        """Rows with positions without gaps, as when the model serves."""
        generator, positions = SKILLS[skill].generator, np.arange(NUM_HELD_OUT_TOKENS, dtype=np.int32)
        drawn = [random_of(HELD_OUT, self._seed, "measure", skill, row) for row in range(NUM_HELD_OUT_ROWS)]
        made = [generator(random, HELD_OUT, NUM_HELD_OUT_TOKENS) for random in drawn]
        return stacked((*lesson(self._text, each, NUM_HELD_OUT_TOKENS), positions) for each in made)
