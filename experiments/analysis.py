"""What notebooks share: runs as polars frames, their pictures and tables with intervals, and the times of steps.

    from moonshard.experiments.analysis import draw_cdf, load_runs

    tables = load_runs("results/transfer/2026-11-23T10-00-00.000000Z")
    draw_cdf(plt.gca(), tables.latencies("ttft"))

A door to modules of `experiments.reading`, nothing of its own. Needs the extra `notebooks`.
"""

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.intervals import latency_interval
from moonshard.experiments.reading.child import StartedServer, run_experiment, start_server
from moonshard.experiments.reading.pictures.colours import colour
from moonshard.experiments.reading.pictures.plots import (
    draw_by_kind,
    draw_cdf,
    draw_gaps_over_time,
    draw_intervals,
    gaps_over_time,
    use_log_scale,
)
from moonshard.experiments.reading.pictures.waterfall import draw_waterfall, slices, timing_of
from moonshard.experiments.reading.step_fit import StepFit, fit_step_model, fit_steps, fit_table, predicted_ms
from moonshard.experiments.reading.step_model import StepModel, StepTimes
from moonshard.experiments.reading.study import (
    Study,
    load_study,
    newest_run,
    pinned_step_model,
    processor_time,
    provenance,
)
from moonshard.experiments.reading.tables.best import best_table
from moonshard.experiments.reading.tables.comparing import Comparison, compare_runs
from moonshard.experiments.reading.tables.interval_tables import (
    median_table,
    offered_table,
    percentile_table,
    rate_table,
    trial_rates,
)
from moonshard.experiments.reading.tables.run_tables import Metric, RunTables, load_runs

__all__ = [
    "Comparison",
    "ExperimentError",
    "Metric",
    "RunTables",
    "StartedServer",
    "StepFit",
    "StepModel",
    "StepTimes",
    "Study",
    "best_table",
    "colour",
    "compare_runs",
    "draw_by_kind",
    "draw_cdf",
    "draw_gaps_over_time",
    "draw_intervals",
    "draw_waterfall",
    "fit_step_model",
    "fit_steps",
    "fit_table",
    "gaps_over_time",
    "latency_interval",
    "load_runs",
    "load_study",
    "median_table",
    "newest_run",
    "offered_table",
    "percentile_table",
    "pinned_step_model",
    "predicted_ms",
    "processor_time",
    "provenance",
    "rate_table",
    "run_experiment",
    "slices",
    "start_server",
    "timing_of",
    "trial_rates",
    "use_log_scale",
]
