"""The times of steps fitted to the tables of a recording, and laid out as tables themselves.

The fit itself is in `common.step_regression`, which needs neither polars nor msgspec: a GPU machine may have neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.step_regression import (
    COEFFICIENTS,
    KINDS,
    MS_OF_UNITS,
    Kind,
    StepRegression,
    TooFewSteps,
    step_features,
)
from moonshard.experiments.reading.step_model import StepModel, StepTimes

__all__ = ["COEFFICIENTS", "Kind", "StepFit", "fit_step_model", "fit_steps", "fit_table", "predicted_ms"]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class StepFit(StepRegression):
    """The coefficients of one kind of step as times, and how well they explain the measurement."""

    @property
    def times(self) -> StepTimes:
        fixed_ms, row_us, pair_ns = self.coefficients
        return StepTimes(fixed_ms=fixed_ms, row_us=row_us, pair_ns=pair_ns)


def fit_steps(steps: pl.DataFrame, kind: Kind) -> StepFit:
    """Fits one kind of step from rows of the table `steps`. ExperimentError where it has fewer than three."""
    own = steps.filter(steps["kind"] == kind)
    try:
        return StepFit.of(kind, device_ns=own["device_ns"].to_numpy(), **_sizes(own))
    except TooFewSteps as error:
        raise ExperimentError(str(error)) from error


def fit_step_model(steps: pl.DataFrame, source: str = "") -> tuple[StepModel, Mapping[Kind, StepFit]]:
    """Fits both kinds of step. ExperimentError where one of them is missing."""
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
                    for name, value in zip(COEFFICIENTS, fit.coefficients, strict=True)
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
    """The steps of the fitted kinds, with the column `predicted_ms`: what each takes when nothing disturbs it."""
    own = steps.filter(pl.col("kind").is_in(KINDS) & (pl.col("batch") > 0))
    features = step_features(**_sizes(own))
    by_kind = [
        features @ (np.array([times.fixed_ms, times.row_us, times.pair_ns]) * MS_OF_UNITS)
        for times in (model.prefill, model.decode)
    ]
    is_prefill = (own["kind"] == "prefill").to_numpy()
    return own.with_columns(pl.Series("predicted_ms", np.where(is_prefill, *by_kind), pl.Float64()))


def _sizes(steps: pl.DataFrame) -> dict[str, np.ndarray]:
    return {name: steps[name].to_numpy() for name in ("bucket", "batch", "context_tokens")}
