"""The pictures that studies share, on axes that are given or in a figure of their own, which the notebook saves."""

from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, StrMethodFormatter

from moonshard.experiments.reading.pictures.colours import COLOURS, colour, dashes, marker
from moonshard.experiments.reading.step_fit import StepFit
from moonshard.experiments.reading.tables.run_tables import RunTables

NS_PER_S = 1e9
PREFILL_COLOUR = COLOURS[1]
PLAIN = StrMethodFormatter("{x:,g}")


def use_log_scale(axes: Axes, *names: Literal["x", "y"]) -> None:
    """A log scale with plain numbers at its ticks, also between decades where it spans few of them."""
    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_formatter(PLAIN)
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def draw_cdf(axes: Axes, latencies: pl.DataFrame, by: str = "label") -> None:
    """The share of `ms` up to each value, a curve for each value of the column `by`, in the order of the rows."""
    for index, ((name,), own) in enumerate(latencies.group_by(by, maintain_order=True)):
        ms = own["ms"].sort().to_numpy()
        share = np.arange(1, len(ms) + 1) / len(ms)
        axes.step(ms, share, where="post", label=str(name), color=colour(index), linestyle=dashes(index))
    use_log_scale(axes, "x")
    axes.set(xlabel="ms", ylabel="share", ylim=(0, 1))
    axes.grid(alpha=0.3)
    if latencies.height:
        axes.legend(fontsize="small")


def draw_intervals(axes: Axes, table: pl.DataFrame, x: str, by: str, value: str = "ms") -> None:
    """`value` over the column `x`, a line for each value of `by`, with its interval where it has one."""
    for index, ((name,), own) in enumerate(table.sort(x).group_by(by, maintain_order=True)):
        at, middle = own[x].to_list(), own[value].to_numpy()
        axes.plot(at, middle, marker=marker(index), markersize=4, label=str(name), color=colour(index))
        bounds = own.select("low", "high").fill_null(float("nan"))
        axes.fill_between(at, bounds["low"].to_numpy(), bounds["high"].to_numpy(), alpha=0.2, color=colour(index))
    axes.set(xlabel=x.rpartition(".")[2].replace("_", " "), ylabel=value)
    axes.grid(alpha=0.3)
    if table.height:
        axes.legend(fontsize="small")


def draw_by_kind(axes: Axes, table: pl.DataFrame, x: str, by: str, value: str = "ms", *, linestyle: str = "-") -> None:
    """`value` over the names in the column `x`, in the order of the rows: a line with intervals for each of `by`."""
    for index, ((name,), own) in enumerate(table.group_by(by, maintain_order=True)):
        bounds = own.select("low", "high").fill_null(float("nan")).to_numpy().T
        axes.errorbar(
            list(map(str, own[x])),
            own[value].to_numpy(),
            abs(bounds - own[value].to_numpy()),
            marker=marker(index),
            linestyle=linestyle,
            color=colour(index),
            capsize=3,
            label=str(name),
        )
    axes.grid(alpha=0.3)


def gaps_over_time(tables: RunTables, trials: pl.DataFrame) -> Figure:
    """A panel for each row (run, point, repeat, name) of `trials`, one below the other, on the same axes."""
    num, size = trials.height, (11, 2.5 * trials.height)
    figure, panels = plt.subplots(num, 1, figsize=size, sharex=True, sharey=True, layout="constrained", squeeze=False)
    for axes, (run, point, repeat, name) in zip(panels[:, 0], trials.iter_rows(), strict=True):
        draw_gaps_over_time(axes, tables, run, point, repeat)
        axes.set_title(str(name))
        axes.label_outer()
    return figure


def draw_gaps_over_time(axes: Axes, tables: RunTables, run: str, point: int, repeat: int) -> None:
    """Each gap between tokens of a trial at the time when it ended, and below them the prefills.

    Prefills are steps of that kind where the server recorded them, as long as they lasted; else the requests' arrivals.
    """
    mine = (pl.col("run") == run) & (pl.col("point") == point) & (pl.col("repeat") == repeat)
    requests, tokens, steps = (frame.filter(mine) for frame in (tables.requests, tables.tokens, tables.steps))
    start_ns = int(requests["sent_ns"].to_numpy().min())
    gap_ms = (pl.col("arrived_ns").diff().over("request_index") / 1e6).alias("gap_ms")
    gaps = tokens.sort("request_index", "index").with_columns(gap_ms)
    gaps = gaps.drop_nulls("gap_ms")
    at_s = (gaps["arrived_ns"] - start_ns) / NS_PER_S
    axes.scatter(at_s, gaps["gap_ms"], s=4, alpha=0.5, linewidths=0, color=COLOURS[0])
    for begin_s, end_s in _prefills_s(requests, steps, start_ns):
        axes.axvspan(begin_s, end_s, ymax=0.04, color=PREFILL_COLOUR, linewidth=0.5)
    use_log_scale(axes, "y")
    axes.set(xlabel="time since the first request, s", ylabel="ITL, ms")
    axes.grid(alpha=0.3)


def _prefills_s(requests: pl.DataFrame, steps: pl.DataFrame, start_ns: int) -> list[tuple[float, float]]:
    own = steps.filter((pl.col("kind") == "prefill") & (pl.col("clock") == requests["clock"][0]))
    if own.is_empty():
        spans = requests.select(pl.col("sent_ns").alias("begin"), pl.col("sent_ns").alias("end"))
    else:
        spans = own.select((pl.col("done_ns") - pl.col("device_ns")).alias("begin"), pl.col("done_ns").alias("end"))
    return [((begin - start_ns) / NS_PER_S, (end - start_ns) / NS_PER_S) for begin, end in spans.iter_rows()]


def draw_fit(axes: Axes, fit: StepFit) -> None:
    """Draws what the fitted times predict for each step, against what it took."""
    ends = [min(fit.measured_ms.min(), fit.predicted_ms.min()), max(fit.measured_ms.max(), fit.predicted_ms.max())]
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    axes.scatter(fit.measured_ms, fit.predicted_ms, s=5, alpha=0.4, linewidths=0, color=COLOURS[0])
    said = f"{fit.kind}: median error {fit.median_error:.0%}, p90 {fit.p90_error:.0%}"
    use_log_scale(axes, "x", "y")
    axes.set(xlabel="measured, ms", ylabel="predicted, ms", title=said)
    axes.grid(alpha=0.3)


def draw_residuals(axes: Axes, fit: StepFit) -> None:
    """Draws how much longer than predicted each step took, by its prediction: what sizes do not explain."""
    longer = 100 * (fit.measured_ms / fit.predicted_ms - 1)
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.scatter(fit.predicted_ms, longer, s=5, alpha=0.4, linewidths=0, color=COLOURS[0])
    use_log_scale(axes, "x")
    axes.set_yscale("symlog", linthresh=10)  # a step that waited takes several times as long
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set(xlabel="predicted, ms", ylabel="measured less predicted, %")
    axes.grid(alpha=0.3)
