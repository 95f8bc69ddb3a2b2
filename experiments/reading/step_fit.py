"""The times of steps fitted to a recording of them: least absolute relative error, no coefficient below 0.

Relative, so that short steps count as long ones do; absolute, so that a step that waited for somebody else, which on a
shared machine takes several times as long, pulls no more than any other. What steps do not tell apart has no
coefficient: where every bucket is the same, nobody knows what a row costs beside the step itself. A coefficient that
would have to be below 0 to fit best is 0, and that is said.
Source: least absolute deviations by iteratively reweighted least squares (Schlossmacher 1973, JASA 68); what is solved
in each round is non-negative least squares, as `serving.ttft` has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from moonshard.experiments.lab.fields import ExperimentError
from moonshard.experiments.reading.step_model import StepModel, StepTimes
from moonshard.serving.ttft import fit

type Kind = Literal["prefill", "decode"]

KINDS: tuple[Kind, ...] = ("prefill", "decode")
MIN_STEPS = 3  # as many as there are coefficients
MAX_ROUNDS = 100
MIN_ERROR = 1e-6  # relative: what is nearer than this weighs no more
SETTLED = 1e-9  # of the predictions, from one round to the next
MS_OF_UNITS = np.array([1.0, 1e-3, 1e-6])  # of milliseconds, microseconds and nanoseconds
COEFFICIENTS = ("each step, ms", "each row, us", "each pair with a token of the context, ns")  # as `StepTimes` has them
ALIKE = 0.02  # relative: a feature that others explain up to this says nothing of its own; steps differ by more


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class StepFit:
    """Coefficients of one kind, and how well they say what was measured."""

    kind: Kind
    times: StepTimes
    unidentified: tuple[str, ...]  # those of COEFFICIENTS that these steps do not tell from the others; 0 in `times`
    at_zero: tuple[str, ...]  # those that they tell, and that are 0 since nothing above it fits better
    measured_ms: np.ndarray  # [steps]
    predicted_ms: np.ndarray  # [steps]

    @property
    def errors(self) -> np.ndarray:
        """[steps]: |predicted - measured| / measured."""
        return np.abs(self.predicted_ms / self.measured_ms - 1)

    @property
    def median_error(self) -> float:
        return float(np.median(self.errors))

    @property
    def p90_error(self) -> float:
        return float(np.quantile(self.errors, 0.9))


def fit_steps(steps: pl.DataFrame, kind: Kind) -> StepFit:
    """Of rows of the table `steps`, those of other kinds left out. ExperimentError where there are fewer than three."""
    own = steps.filter((steps["kind"] == kind) & (steps["device_ns"] > 0) & (steps["batch"] > 0))
    if own.height < MIN_STEPS:
        raise ExperimentError(f"{own.height} steps of kind {kind}: times are fitted to at least {MIN_STEPS}")
    columns = {name: own[name].to_numpy().astype(float) for name in ("bucket", "batch", "context_tokens")}
    measured_ms = own["device_ns"].to_numpy() / 1e6
    features = _features(columns)
    relative = features / measured_ms[:, None]
    told = _independent(relative)
    coefficients = np.zeros(features.shape[1])
    coefficients[told] = _least_absolute(relative[:, told])
    fixed_ms, row_us, pair_ns = map(float, coefficients / MS_OF_UNITS)
    return StepFit(
        kind=kind,
        times=StepTimes(fixed_ms=fixed_ms, row_us=row_us, pair_ns=pair_ns),
        unidentified=tuple(name for index, name in enumerate(COEFFICIENTS) if index not in told),
        at_zero=tuple(COEFFICIENTS[index] for index in told if coefficients[index] == 0),
        measured_ms=measured_ms,
        predicted_ms=features @ coefficients,
    )


def fit_step_model(steps: pl.DataFrame, source: str = "") -> tuple[StepModel, Mapping[Kind, StepFit]]:
    """Of both kinds. ExperimentError where one of them is missing."""
    fits: dict[Kind, StepFit] = {kind: fit_steps(steps, kind) for kind in KINDS}
    model = StepModel(prefill=fits["prefill"].times, decode=fits["decode"].times, source=source)
    return model, fits


def fit_table(fits: Mapping[Kind, StepFit]) -> pl.DataFrame:
    """A row for each kind: coefficients with their units, those without a number and those at 0 named, and errors."""
    return pl.DataFrame(
        [
            {
                "kind": kind,
                "steps": len(fit.measured_ms),
                **{
                    name: None if name in fit.unidentified else value
                    for name, value in zip(
                        COEFFICIENTS, (fit.times.fixed_ms, fit.times.row_us, fit.times.pair_ns), strict=True
                    )
                },
                "not told by these steps": ", ".join(fit.unidentified) or None,
                "at 0, since nothing above it fits better": ", ".join(fit.at_zero) or None,
                "median relative error": fit.median_error,
                "p90 relative error": fit.p90_error,
            }
            for kind, fit in fits.items()
        ],
        schema_overrides={
            **dict.fromkeys(COEFFICIENTS, pl.Float64()),
            "not told by these steps": pl.String(),
            "at 0, since nothing above it fits better": pl.String(),
        },
    )


def predicted_ms(steps: pl.DataFrame, model: StepModel) -> pl.DataFrame:
    """The steps of the kinds that have times, with these in the column `predicted_ms`: what they take undisturbed."""
    own = steps.filter(pl.col("kind").is_in(KINDS) & (pl.col("batch") > 0))
    columns = {name: own[name].to_numpy().astype(float) for name in ("bucket", "batch", "context_tokens")}
    by_kind = [
        _features(columns) @ (np.array([times.fixed_ms, times.row_us, times.pair_ns]) * MS_OF_UNITS)
        for times in (model.prefill, model.decode)
    ]
    is_prefill = (own["kind"] == "prefill").to_numpy()
    return own.with_columns(pl.Series("predicted_ms", np.where(is_prefill, *by_kind), pl.Float64()))


def _features(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """[steps, 3], as `StepTimes.ms` multiplies them, before the units."""
    bucket = columns["bucket"]
    return np.column_stack([np.ones_like(bucket), bucket, bucket * columns["context_tokens"] / columns["batch"]])


def _independent(features: np.ndarray) -> list[int]:
    """The columns that are no sum of those before them."""
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
