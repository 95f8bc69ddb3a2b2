"""What notebooks share: runs as polars frames, their pictures and tables with intervals, and the times of steps.

    from moonshard.experiments.analysis import draw_cdf, load

    tables = load("results/transfer/2026-11-23T10-00-00.000000Z")
    draw_cdf(plt.gca(), tables.latencies("ttft"))

A door to modules of `experiments.lab`, nothing of its own. It needs matplotlib, which the server does not.
"""

from moonshard.experiments.lab.child import run_experiment, served
from moonshard.experiments.lab.comparing import compare_runs
from moonshard.experiments.lab.fields import ExperimentError
from moonshard.experiments.lab.intervals import percentile_table, rate_table
from moonshard.experiments.lab.plots import draw_cdf, draw_fit, draw_gaps_over_time, draw_intervals
from moonshard.experiments.lab.run_tables import RunTables, load
from moonshard.experiments.lab.step_fit import StepFit, fit_model, fit_steps, fit_table
from moonshard.experiments.lab.step_model import StepModel, StepTimes
from moonshard.experiments.lab.study import Study, load_study, newest_run, processor_time, source
from moonshard.experiments.lab.waterfall import draw_waterfall, slices, timing_of

__all__ = [
    "ExperimentError",
    "RunTables",
    "StepFit",
    "StepModel",
    "StepTimes",
    "Study",
    "compare_runs",
    "draw_cdf",
    "draw_fit",
    "draw_gaps_over_time",
    "draw_intervals",
    "draw_waterfall",
    "fit_model",
    "fit_steps",
    "fit_table",
    "load",
    "load_study",
    "newest_run",
    "percentile_table",
    "processor_time",
    "rate_table",
    "run_experiment",
    "served",
    "slices",
    "source",
    "timing_of",
]
