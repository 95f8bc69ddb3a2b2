# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Prefill and decode apart, or both everywhere?
#
# The same two devices, each one core, under the same requests. What the arrangements are and why the load is as it is
# stands in `README.md`.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import (
    draw_cdf,
    draw_fit,
    draw_gaps_over_time,
    draw_intervals,
    fit_model,
    fit_table,
    load_study,
    percentile_table,
    processor_time,
    rate_table,
    source,
)

study = load_study("pd_vs_aggregated", os.environ)
tables = study.tables
RATE = "workload.rate_per_s"
source(study.run)

# %% [markdown]
# An arm is an arrangement with its chunk size.

# %%
arm = pl.when(pl.col("server.mode") == "disaggregated").then(pl.lit("apart"))
arm = arm.otherwise(pl.format("both, chunks of {}", "server.prefill.chunk_tokens")).alias("arm")
gaps = percentile_table(tables, "itl").with_columns(arm)
ttft = percentile_table(tables, "ttft").with_columns(arm)
rates = rate_table(tables).with_columns(arm)
gaps.select("arm", RATE, "percentile", "ms", "low", "high", "num_requests")

# %% [markdown]
# ## Over load
#
# Bands are 95% intervals.

# %%
figure, panels = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
for axes, percentile in zip(panels[0], ("p50", "p90", "p99"), strict=True):
    draw_intervals(axes, gaps.filter(percentile=percentile), RATE, "arm")
    axes.set(yscale="log", ylabel=f"gap between tokens, {percentile}, ms")
draw_intervals(panels[1, 0], ttft.filter(percentile="p90"), RATE, "arm")
panels[1, 0].set(yscale="log", ylabel="TTFT, p90, ms")
draw_intervals(panels[1, 1], rates.filter(rate="in SLO"), RATE, "arm", "value")
panels[1, 1].set(ylabel="share of requests within the SLO", ylim=(0, 1.02))
handoffs = percentile_table(tables, "handoff_gap").with_columns(arm)
draw_intervals(panels[1, 2], handoffs, RATE, "percentile")
panels[1, 2].set(ylabel="first to second token of a handoff, ms")
study.save(figure, "over_load")

# %% [markdown]
# ## The baseline at its best
#
# At each rate the aggregated arm that keeps most requests within the SLO, beside prefill and decode apart. The last
# column is the bar: at least 3 where the baseline has lost its SLO.

# %%
keys = (RATE, "arm")
found = (
    gaps.filter(percentile="p90")
    .select(*keys, pl.col("ms").alias("ITL p90, ms"))
    .join(ttft.filter(percentile="p90").select(*keys, pl.col("ms").alias("TTFT p90, ms")), on=keys)
    .join(rates.filter(rate="in SLO").select(*keys, pl.col("value").alias("in SLO")), on=keys)
)
apart = found.filter(arm="apart").drop("arm")
best = (
    found.filter(pl.col("arm") != "apart").sort("in SLO", descending=True).group_by(RATE, maintain_order=True).first()
)
both = apart.join(best, on=RATE, suffix=", best aggregated").sort(RATE)
both.with_columns((pl.col("ITL p90, ms, best aggregated") / pl.col("ITL p90, ms")).alias("times better, ITL p90"))

# %% [markdown]
# ## At the highest rate
#
# All gaps between tokens, and the same over time: each red mark is a prefill step.

# %%
highest = tables.latencies("itl").with_columns(arm).filter(pl.col(RATE) == pl.col(RATE).max())
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
draw_cdf(axes, highest, "arm")
axes.set(xlabel="gap between tokens, ms")
study.save(figure, "gaps")

# %%
points = highest.select("run", "point", "repeat", "arm").unique(maintain_order=True).filter(pl.col("repeat") == 0)
figure, panels = plt.subplots(
    points.height, 1, figsize=(11, 2.4 * points.height), sharex=True, sharey=True, layout="constrained", squeeze=False
)
for axes, (run, point, repeat, name) in zip(panels[:, 0], points.iter_rows(), strict=True):
    draw_gaps_over_time(axes, tables, run, point, repeat)
    axes.set_title(name)
study.save(figure, "gaps_over_time")

# %% [markdown]
# ## What the load generator took
#
# Gateway and load generator run on the devices' cores, so that both arms pay for them.

# %%
processor_time(tables).with_columns(arm).pivot("process", index=keys, values="cores")

# %% [markdown]
# ## How long steps take

# %%
model, fits = fit_model(tables.steps, source(study.run))
study.keep(model)
fit_table(fits)

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for axes, fit in zip(panels, fits.values(), strict=True):
    draw_fit(axes, fit)
study.save(figure, "steps")
