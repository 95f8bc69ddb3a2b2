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
    draw_intervals,
    gaps_over_time,
    load_study,
    percentile_table,
    processor_time,
    provenance,
    rate_table,
)

study = load_study("pd_vs_aggregated", os.environ)
tables = study.tables
RATE = "workload.rate_per_s"
provenance(study.run)

# %% [markdown]
# An arm is an arrangement with its chunk size.

# %%
arm = pl.when(pl.col("server.mode") == "disaggregated").then(pl.lit("apart"))
arm = arm.otherwise(pl.format("both, chunks of {}", "server.prefill.chunk_tokens")).alias("arm")
gaps = percentile_table(tables, "itl").with_columns(arm)
ttft = percentile_table(tables, "ttft").with_columns(arm)
handoffs = percentile_table(tables, "handoff_gap").with_columns(arm)
attained = rate_table(tables, "SLO attainment").with_columns(arm)
gaps.select("arm", RATE, "percentile", "ms", "low", "high", "num_requests", "num_repeats")

# %% [markdown]
# ## Over load
#
# Bands are 95% intervals.

# %%
figure, panels = plt.subplots(3, 3, figsize=(13, 10), layout="constrained")
for column, percentile in enumerate(("p50", "p90", "p99")):
    for row, (said, table) in enumerate((("gap between tokens", gaps), ("TTFT", ttft))):
        draw_intervals(panels[row, column], table.filter(percentile=percentile), RATE, "arm")
        panels[row, column].set(yscale="log", ylabel=f"{said}, {percentile}, ms")
draw_intervals(panels[2, 0], attained, RATE, "arm", "value")
panels[2, 0].set(ylabel="SLO attainment", ylim=(0, 1.02))
draw_intervals(panels[2, 1], handoffs, RATE, "percentile")
panels[2, 1].set(ylabel="first to second token of a handoff, ms")
panels[2, 2].set_axis_off()
study.save_figure(figure, "over_load")

# %% [markdown]
# ## The handoff gap
#
# What a client waits from its first token to its second, where the KV moved in between: sending the first token early
# must not hide the transfer.

# %%
handoffs.select(RATE, "percentile", "ms", "low", "high", "num_requests", "num_repeats")

# %% [markdown]
# ## The baseline at its best
#
# At each rate the aggregated arm that keeps most requests within the SLO, and of several that keep as many the one with
# the lowest p90 of gaps, beside prefill and decode apart. The bar is in the last two columns: where the baseline has
# lost its SLO, at least 3 times better.

# %%
keys = (RATE, "arm")
ATTAINMENT = study.run.record.points[0].settings["slo.attainment"]
found = (
    gaps.filter(percentile="p90")
    .select(*keys, pl.col("ms").alias("ITL p90, ms"))
    .join(ttft.filter(percentile="p90").select(*keys, pl.col("ms").alias("TTFT p90, ms")), on=keys)
    .join(attained.select(*keys, pl.col("value").alias("SLO attainment")), on=keys)
)
apart = found.filter(arm="apart").drop("arm")
ranked = found.filter(pl.col("arm") != "apart").sort("SLO attainment", -pl.col("ITL p90, ms"), descending=True)
best = ranked.group_by(RATE, maintain_order=True).first()
both = apart.join(best, on=RATE, suffix=", best aggregated").sort(RATE)
both.with_columns(
    (pl.col("SLO attainment, best aggregated") < pl.lit(ATTAINMENT)).alias("baseline has lost its SLO"),
    (pl.col("ITL p90, ms, best aggregated") / pl.col("ITL p90, ms")).alias("times better, ITL p90"),
)

# %% [markdown]
# ## At the highest rate
#
# All gaps between tokens, and the same over time: each red mark is a prefill step.

# %%
highest = tables.latencies("itl").with_columns(arm).filter(pl.col(RATE) == pl.col(RATE).max())
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
draw_cdf(axes, highest, "arm")
axes.set(xlabel="gap between tokens, ms")
study.save_figure(figure, "gaps")

# %%
points = highest.select("run", "point", "repeat", "arm").unique(maintain_order=True).filter(pl.col("repeat") == 0)
figure = gaps_over_time(tables, points)
study.save_figure(figure, "gaps_over_time")

# %% [markdown]
# ## What the load generator took
#
# Gateway and load generator run on the devices' cores, so that both arms pay for them.

# %%
processor_time(tables).with_columns(arm).pivot("process", index=keys, values="cores")

# %% [markdown]
# ## How long steps take

# %%
study.step_times()
