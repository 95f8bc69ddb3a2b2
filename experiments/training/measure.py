"""Teacher-forced accuracy: with the true tokens before it, is each token of an answer the likeliest?

Cheap enough to be taken while training, and no guess: an answer is wholly right here exactly if greedy decoding from
its first token on gives it. How well the model serves is the evaluation's business.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moonshard.experiments.training.run.recipe import ANSWER_WEIGHT, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Shares of 1 over what was measured; 0 of 0 is 0."""

    answers: float  # wholly right
    tokens: float
    num_answers: int


def accuracy(predictions: np.ndarray, rows: Rows) -> Accuracy:
    """Compares predictions [n, t] of `rows.tokens[:, 1:]`. An answer is a run of tokens of ANSWER_WEIGHT or more."""
    is_answer = rows.weights >= ANSWER_WEIGHT
    is_right = predictions == rows.tokens[:, 1:]
    answers = [right.all() for row in zip(is_answer, is_right, strict=True) for right in _runs(*row)]
    return Accuracy(
        answers=float(np.mean(answers)) if answers else 0.0,
        tokens=float(is_right[is_answer].mean()) if is_answer.any() else 0.0,
        num_answers=len(answers),
    )


def measure(predict: Callable[[Rows], np.ndarray], held_out: Mapping[str, Rows]) -> dict[str, Accuracy]:
    return {skill: accuracy(predict(rows), rows) for skill, rows in held_out.items()}


def _runs(is_answer: np.ndarray, is_right: np.ndarray) -> list[np.ndarray]:
    """For one row, whether each answer is right throughout. An answer cut off by the row's end counts as it stands."""
    edges = np.flatnonzero(np.diff(is_answer, prepend=False, append=False))
    return [is_right[start:stop] for start, stop in edges.reshape(-1, 2)]
