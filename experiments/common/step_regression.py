"""The times of steps fitted to a recording of them: least absolute relative error, no coefficient below 0.

Relative, so that short steps count as long ones do; absolute, so that a step that waited for somebody else, which on a
shared machine takes several times as long, pulls no more than any other. A step that is told far too short pulls more:
what is predicted too low is wrong by 1 at most, too high by any factor. What steps do not tell apart has no
coefficient: where every bucket is the same, nobody knows what a row costs beside the step itself. A coefficient that
would have to be below 0 to fit best is 0, and that is said.
It runs with numpy alone, so that a bare GPU machine can fit its own steps; `reading.step_fit` needs polars.
Source: least absolute deviations by iteratively reweighted least squares (Schlossmacher 1973, JASA 68); what is solved
in each round is non-negative least squares, as in `serving.control.ttft.model`.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from moonshard.serving.control.ttft.model import fit

type Kind = Literal["prefill", "decode"]

KINDS: tuple[Kind, ...] = ("prefill", "decode")
MIN_STEPS = 3  # as many as there are coefficients
MAX_ROUNDS = 100
MIN_ERROR = 1e-6  # relative: what is nearer than this weighs no more
SETTLED = 1e-9  # of the predictions, from one round to the next
MS_OF_UNITS = np.array([1.0, 1e-3, 1e-6])  # of milliseconds, microseconds and nanoseconds
COEFFICIENTS = ("each step, ms", "each row, us", "each pair with a token of the context, ns")  # as `StepTimes` has them
ALIKE = 0.02  # relative: a feature that others explain up to this says nothing of its own; steps differ by more


class TooFewSteps(ValueError):
    """Fewer steps of a kind than there are coefficients."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class StepRegression:
    """The fitted coefficients of one kind of step, and how well they explain the measurement."""

    kind: Kind
    coefficients: tuple[float, float, float]  # in the order and the units of COEFFICIENTS
    unidentified: tuple[str, ...]  # those of COEFFICIENTS that these steps do not tell from the others; 0 above
    at_zero: tuple[str, ...]  # those that they tell, and that are 0 since nothing above it fits better
    measured_ms: np.ndarray  # [steps]
    predicted_ms: np.ndarray  # [steps]

    @classmethod
    def of(
        cls, kind: Kind, *, bucket: np.ndarray, batch: np.ndarray, context_tokens: np.ndarray, device_ns: np.ndarray
    ) -> Self:
        """Fits the steps of one kind, [steps] each; those without a time or a sequence are dropped.

        Raises TooFewSteps where fewer than three are left.
        """
        is_whole = (device_ns > 0) & (batch > 0)
        if is_whole.sum() < MIN_STEPS:
            raise TooFewSteps(f"{is_whole.sum()} steps of kind {kind}: times are fitted to at least {MIN_STEPS}")
        features = step_features(bucket[is_whole], batch[is_whole], context_tokens[is_whole])
        measured_ms = device_ns[is_whole] / 1e6
        relative = features / measured_ms[:, None]
        told = _independent(relative)
        found = np.zeros(features.shape[1])
        found[told] = _least_absolute(relative[:, told])
        fixed_ms, row_us, pair_ns = map(float, found / MS_OF_UNITS)
        return cls(
            kind=kind,
            coefficients=(fixed_ms, row_us, pair_ns),
            unidentified=tuple(name for index, name in enumerate(COEFFICIENTS) if index not in told),
            at_zero=tuple(COEFFICIENTS[index] for index in told if found[index] == 0),
            measured_ms=measured_ms,
            predicted_ms=features @ found,
        )

    @property
    def errors(self) -> np.ndarray:
        """The relative errors |predicted - measured| / measured [steps]."""
        return np.abs(self.predicted_ms / self.measured_ms - 1)

    @property
    def median_error(self) -> float:
        return float(np.median(self.errors))

    @property
    def p90_error(self) -> float:
        return float(np.quantile(self.errors, 0.9))


def step_features(bucket: np.ndarray, batch: np.ndarray, context_tokens: np.ndarray) -> np.ndarray:
    """[steps, 3]: what `StepTimes.ms` multiplies with the coefficients, before the units."""
    rows = bucket.astype(float)
    return np.column_stack([np.ones_like(rows), rows, rows * context_tokens / batch])


def _independent(features: np.ndarray) -> list[int]:
    """The columns that are no linear combination of those before them."""
    found: list[int] = []
    for index in range(features.shape[1]):
        column = features[:, index]
        known = features[:, found]
        rest = column - known @ np.linalg.lstsq(known, column)[0] if found else column
        if np.linalg.norm(rest) > ALIKE * np.linalg.norm(column):
            found.append(index)
    return found


def _least_absolute(features: np.ndarray) -> np.ndarray:
    """The coefficients [k], none below 0, that bring `features` [n k] nearest to 1 each."""
    ones = np.ones(len(features))
    weights, predicted = ones, np.zeros(len(features))
    coefficients = np.zeros(features.shape[1])
    for _ in range(MAX_ROUNDS):
        roots = np.sqrt(weights)
        coefficients = fit(features * roots[:, None], roots)
        before, predicted = predicted, features @ coefficients
        if np.abs(predicted - before).max() < SETTLED:
            break
        weights = 1 / np.maximum(np.abs(predicted - 1), MIN_ERROR)
    return coefficients
