"""Pictures show what is there: curves with their names, and prefills below the gaps that they caused."""

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from moonshard.experiments.reading.pictures.plots import (
    draw_by_kind,
    draw_cdf,
    draw_fit,
    draw_gaps_over_time,
    draw_intervals,
    draw_residuals,
    gaps_over_time,
)
from moonshard.experiments.reading.step_fit import fit_step_model
from moonshard.experiments.reading.tables.interval_tables import percentile_table
from moonshard.experiments.reading.tables.run_tables import RunTables
from tests.experiments.reading.made_up import GAP_MS


def test_pictures_show_what_is_there(tables: RunTables):
    cdf, lines, gaps, fitted = Figure().subplots(1, 4)
    draw_cdf(cdf, tables.latencies("ttft"), "server.mode")
    assert [line.get_label() for line in cdf.lines] == ["aggregated", "disaggregated"]
    assert cdf.lines[0].get_xdata().tolist() == [1, 1, 2, 2, 3, 3]
    draw_cdf(gaps, tables.latencies("handoff_gap"))
    draw_intervals(lines, percentile_table(tables, "ttft"), "point", "percentile")
    assert [line.get_label() for line in lines.lines] == ["p50", "p90", "p99"]
    _, fits = fit_step_model(tables.steps)
    draw_fit(fitted, fits["decode"])
    assert fits["decode"].median_error < 1e-6


def test_curves_differ_in_colour_and_in_their_marks_or_dashes(tables: RunTables):
    cdf, lines, kinds = Figure().subplots(1, 3)
    draw_cdf(cdf, tables.latencies("ttft"), "server.mode")
    draw_intervals(lines, percentile_table(tables, "ttft"), "point", "percentile")
    draw_by_kind(kinds, percentile_table(tables, "ttft"), "server.mode", "percentile")
    assert len({line.get_linestyle() for line in cdf.lines}) == 2
    assert len({line.get_marker() for line in lines.lines}) == 3
    assert [one.get_label() for one in kinds.containers] == ["p50", "p90", "p99"]
    for axes in (cdf, lines):
        assert len({line.get_color() for line in axes.lines}) == len(axes.lines)


def test_residuals_are_percent_of_the_prediction(tables: RunTables):
    _, fits = fit_step_model(tables.steps)
    axes = Figure().subplots()
    fit = fits["prefill"]
    draw_residuals(axes, fit)
    (points,) = axes.collections
    offsets = np.asarray(points.get_offsets())
    assert offsets[:, 0].tolist() == fit.predicted_ms.tolist()
    assert offsets[:, 1] == pytest.approx(100 * (fit.measured_ms / fit.predicted_ms - 1))


@pytest.mark.parametrize(("has_steps", "num_marks"), [(True, 3), (False, 4)])
def test_gaps_over_time_have_prefills_below_or_else_arrivals(tables: RunTables, has_steps: bool, num_marks: int):
    steps = tables.steps if has_steps else tables.steps.clear()
    known = RunTables(tables.runs, tables.swept, tables.requests, tables.tokens, tables.server_requests, steps)
    axes = Figure().subplots()
    draw_gaps_over_time(axes, known, tables.runs[0].path.name, 0, 0)
    assert len(axes.patches) == num_marks
    (points,) = axes.collections
    offsets = np.asarray(points.get_offsets())
    assert offsets[:, 1].tolist() == [GAP_MS] * 6
    assert offsets[0, 0] == pytest.approx(0.005)


def test_each_trial_that_is_asked_for_has_a_panel(tables: RunTables):
    trials = tables.requests.select("run", "point", "repeat", "server.mode").unique(maintain_order=True)
    figure = gaps_over_time(tables, trials.filter(pl.col("repeat") == 0))
    assert [axes.get_title() for axes in figure.axes] == ["aggregated", "disaggregated"]
    plt.close(figure)
