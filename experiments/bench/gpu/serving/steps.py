"""Steps of the engines on one device as columns, and how long steps take by their sizes: the fit of `step_regression`.

What a step took is what it added to the time that the device had been busy. Loads and copies are left out, since nobody
waits for their end. Only steps of a single engine are fitted: on a GPU steps of two engines that are
under way at once end almost together, so that one is told with the time of both and the other with a fraction of a
millisecond.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moonshard.experiments.bench.gpu.serving.apart import APART, OnDone
from moonshard.experiments.common.step_regression import COEFFICIENTS, KINDS, Kind, StepRegression
from moonshard.serving.control.plan import Plan
from moonshard.serving.engine.device import StepDone
from moonshard.serving.engine.steps import StepKind
from moonshard.serving.observe.rows.schema import STEPS, TableRow
from moonshard.serving.observe.rows.steps import StepTrace

COLUMNS = {column.name: index for index, column in enumerate(STEPS.columns)}
WORST_MEDIAN_ERROR = 0.25  # a fit that is further off for every other step is no model of them
KEPT = ("kind", "bucket", "batch", "tokens", "context_tokens", "blocks", "device_ns")


class StepRows:
    """Rows of the table `steps`, with the arm in the column `worker`."""

    def __init__(self) -> None:
        self._rows: list[TableRow] = []

    def of_run(self, arm: str) -> OnDone:
        """Listeners for all engines of one run. They share one trace, since they share one device."""
        trace = StepTrace(self._rows.append, (arm, "", ""))

        def told(done: StepDone, plan: Plan | None) -> None:
            if done.kind not in (StepKind.LOAD, StepKind.COPY):
                trace(done, plan)

        return told

    def columns(self) -> dict[str, list[Any]]:
        """Columns of [steps] each: the arm, what the step was, and how long it took."""
        return {
            "arm": [row[COLUMNS["worker"]] for row in self._rows],
            **{name: [row[COLUMNS[name]] for row in self._rows] for name in KEPT},
        }


def fit_columns(columns: Mapping[str, list[Any]]) -> dict[Kind, StepRegression]:
    """Fits both kinds of step, from columns as in `StepRows.columns`; the steps of two engines are left out.

    Raises TooFewSteps for fewer than three of a kind.
    """
    kinds, is_single = np.asarray(columns["kind"]), np.asarray(columns["arm"]) != APART

    def own(kind: Kind, name: str) -> np.ndarray:
        return np.asarray(columns[name])[is_single & (kinds == kind)]

    return {
        kind: StepRegression.of(
            kind,
            bucket=own(kind, "bucket"),
            batch=own(kind, "batch"),
            context_tokens=own(kind, "context_tokens"),
            device_ns=own(kind, "device_ns"),
        )
        for kind in KINDS
    }


def as_model(fits: Mapping[Kind, StepRegression], source: str) -> dict[str, Any]:
    """The fit as JSON that `StepModel.from_json` reads (`reading.step_model`), and each kind's errors beside it."""
    return {**{kind: _as_json(fit) for kind, fit in fits.items()}, "source": source}


def _as_json(fit: StepRegression) -> dict[str, Any]:
    fixed_ms, row_us, pair_ns = fit.coefficients
    return {
        "fixed_ms": fixed_ms,
        "row_us": row_us,
        "pair_ns": pair_ns,
        "unidentified": fit.unidentified,
        "at_zero": fit.at_zero,
        "median_error": fit.median_error,
        "p90_error": fit.p90_error,
        "num_steps": len(fit.measured_ms),
    }


def spell_fit(fit: StepRegression) -> str:
    """The fit in one line. A coefficient that these steps cannot tell has no number; a fit that is far off has none."""
    errors = f"median error {fit.median_error:.1%}, p90 {fit.p90_error:.1%}, {len(fit.measured_ms):,} steps"
    if fit.median_error > WORST_MEDIAN_ERROR:
        return f"{fit.kind}: bucket, batch and context do not say how long these steps take; {errors}"
    named = zip(COEFFICIENTS, fit.coefficients, strict=True)
    said = ", ".join(
        f"{name} {'unidentified' if name in fit.unidentified else f'{value:.3f}'}" for name, value in named
    )
    return f"{fit.kind}: {said}; {errors}"
