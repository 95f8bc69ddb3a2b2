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
# # Disaggregated or aggregated?
#
# The same two devices, each one core, under the same requests. What the arrangements are and why the load is as it is
# stands in `README.md`.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import (
    Metric,
    best_table,
    draw_cdf,
    draw_intervals,
    gaps_over_time,
    load_study,
    median_table,
    percentile_table,
    processor_time,
    provenance,
    rate_table,
    trial_rates,
    use_log_scale,
)
from moonshard.experiments.common.intervals import Interval, ratio_interval
from moonshard.experiments.studies.pd_vs_aggregated.bar import Load, verdict

study = load_study("pd_vs_aggregated", os.environ)
tables = study.tables
RATE = "workload.rate_per_s"
provenance(study.run)

# %% [markdown]
# ## By arm and rate
#
# An arm is an arrangement with its chunk size. It has lost its SLO where less than 90% of its requests keep to it.

# %%
arm = pl.when(pl.col("server.mode") == "disaggregated").then(pl.lit("disaggregated"))
arm = arm.otherwise(pl.format("aggregated, chunk {}", "server.prefill.chunk_tokens")).alias("arm")
gaps = percentile_table(tables, "itl").with_columns(arm)
tpot = percentile_table(tables, "tpot").with_columns(arm)
ttft = percentile_table(tables, "ttft").with_columns(arm)
handoffs = percentile_table(tables, "handoff_gap").with_columns(arm)
attained = rate_table(tables, "SLO attainment").with_columns(arm)
keys = [RATE, "arm"]
ATTAINMENT = study.slo.attainment


def wide(table: pl.DataFrame, name: str) -> pl.DataFrame:
    """A column for each percentile."""
    named = table.with_columns(pl.concat_str(pl.lit(f"{name} "), "percentile", pl.lit(", ms")).alias("name"))
    return named.pivot("name", index=keys, values="ms")


table = attained.select(
    *keys, pl.col("value").alias("SLO attainment"), (pl.col("value") < ATTAINMENT).alias("SLO lost")
)
for name, percentiles in (("ITL", gaps), ("TPOT", tpot), ("TTFT", ttft)):
    table = table.join(wide(percentiles, name), on=keys)
table.sort(RATE, maintain_order=True)

# %% [markdown]
# The same with 95% intervals over the repeats.

# %%
METRIC_TABLES = {"ITL": gaps, "TPOT": tpot, "TTFT": ttft}
named = [table.with_columns(pl.lit(name).alias("of")) for name, table in METRIC_TABLES.items()]
pl.concat(named).select("of", "arm", RATE, "percentile", "ms", "low", "high", "num_requests", "num_repeats")

# %%
attained.select(*keys, pl.col("value").alias("SLO attainment"), "low", "high", "num_repeats").sort(keys)

# %% [markdown]
# TTFT of short prompts, most of which stream, and of long ones; and the share of the short ones' gaps that are longer
# than the SLO's mean.

# %%
is_stream = pl.col("max_tokens") > pl.col("planned_prompt_tokens")
by_prompt = [
    wide(percentile_table(tables, "ttft", where=where).with_columns(arm), f"TTFT {name}")
    for name, where in (("short", is_stream), ("long", ~is_stream))
]
stopped = tables.latencies("itl", is_stream).with_columns(arm).group_by(keys)
stopped = stopped.agg((pl.col("ms") > study.slo.tpot_ms).mean().alias(f"gaps above {study.slo.tpot_ms:g} ms"))
by_prompt[0].join(by_prompt[1], on=keys).join(stopped, on=keys).sort(keys)

# %% [markdown]
# ## Over load
#
# Bands are 95% intervals.

# %%
figure, panels = plt.subplots(3, 3, figsize=(13, 10), layout="constrained")
for column, percentile in enumerate(("p50", "p90", "p99")):
    for row, (name, table) in enumerate((("ITL", gaps), ("TTFT", ttft))):
        draw_intervals(panels[row, column], table.filter(percentile=percentile), RATE, "arm")
        use_log_scale(panels[row, column], "y")
        panels[row, column].set(ylabel=f"{name}, {percentile}, ms")
draw_intervals(panels[2, 0], attained, RATE, "arm", "value")
panels[2, 0].set(ylabel="SLO attainment", ylim=(0, 1.02))
draw_intervals(panels[2, 1], handoffs, RATE, "percentile")
panels[2, 1].set(ylabel="first to second token of a handoff, ms")
for axes in panels.flat[:7]:
    axes.get_legend().remove()
for axes in panels.flat[:8]:
    axes.set(xlabel="offered, requests/s")
panels[2, 2].legend(*panels[0, 0].get_legend_handles_labels(), loc="center", title="arm, in the first seven panels")
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
# Its parts, as far as they were measured: the transfer as a whole, most of it beside the prefill, what of it came after
# the first token, landing, and the wait for the next decode step.

# %%
PARTS = ["handoff_gap_ms", "transfer_ms", "exposed_transfer_ms", "land_ms", "join_ms"]
moved = tables.server_requests.filter(pl.col("transfer_ms").is_not_null()).select(RATE, *PARTS)
moved.unpivot(PARTS, index=RATE, variable_name="part", value_name="ms").group_by(RATE, "part", maintain_order=True).agg(
    *(pl.col("ms").quantile(share, "equiprobable").alias(f"p{100 * share:.0f}, ms") for share in (0.5, 0.9, 0.99)),
    pl.col("ms").count().alias("requests"),
).sort(RATE, maintain_order=True)

# %% [markdown]
# ## The baseline at its best
#
# At each rate the aggregated arm that keeps most requests within the SLO. Arms that the repeats do not tell from it are
# tied with it, and of these the best is the one with the lowest p90 ITL. `times better` is its p90 ITL by that of
# the disaggregated arm, the geometric mean of the repeats, with a 95% interval.

# %%
is_aggregated = pl.col("arm") != "disaggregated"
best = best_table(
    trial_rates(tables, "SLO attainment").with_columns(arm).filter(is_aggregated), gaps.filter(is_aggregated), [RATE]
)


def times_better(metric: Metric, share: float) -> pl.DataFrame:
    """By rate: this percentile of the best aggregated arm, by that of the disaggregated one."""
    by_repeat = tables.latencies(metric).with_columns(arm).group_by(*keys, "repeat", maintain_order=True)
    found = by_repeat.agg(pl.col("ms").quantile(share, "equiprobable"))
    beside = found.join(best.select(RATE, pl.col("best").alias("arm")), on=keys)
    beside = beside.join(found.filter(arm="disaggregated").drop("arm"), on=[RATE, "repeat"], suffix=" disaggregated")
    ratios = beside.with_columns((pl.col("ms") / pl.col("ms disaggregated")).alias("times better")).sort(RATE, "repeat")
    return median_table(ratios, [RATE], "times better", ratio_interval)


baseline = best.with_columns((pl.col("SLO attainment") < ATTAINMENT).alias("SLO lost"))
baseline = baseline.join(times_better("itl", 0.9), on=RATE)
baseline.sort(RATE)

# %% [markdown]
# ## The bar
#
# At the lowest rate at which the baseline, at its best, has lost its SLO.

# %%
loads = [
    Load(
        rate_per_s=row[RATE],
        baseline=row["best"],
        attained=row["SLO attainment"],
        times_better=Interval(
            value=row["times better"], low=row["low"], high=row["high"], num_repeats=row["num_repeats"]
        ),
    )
    for row in baseline.iter_rows(named=True)
]
print(verdict(loads, ATTAINMENT))

# %% [markdown]
# What the bar does not see: of all gaps a standing stream has few, and so the longer it stands, the lower is the
# percentile from which on that shows. A request's TPOT has its stops in it, however few. Below 1 is worse.

# %%
METRICS: tuple[Metric, ...] = ("itl", "tpot", "ttft", "e2e")
others = [
    times_better(metric, share).with_columns(pl.lit(f"{metric.upper()} p{100 * share:.0f}").alias("of"))
    for metric in METRICS
    for share in (0.5, 0.9, 0.99)
]
pl.concat(others).sort(RATE, maintain_order=True).select("of", RATE, "times better", "low", "high", "num_repeats")

# %% [markdown]
# ## At the highest rate
#
# All ITL, and over time: each mark at the bottom is a prefill step, as long as it lasted.

# %%
highest = tables.latencies("itl").with_columns(arm).filter(pl.col(RATE) == pl.col(RATE).max())
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
draw_cdf(axes, highest, "arm")
axes.set(xlabel="ITL, ms")
study.save_figure(figure, "itl")

# %%
points = highest.select("run", "point", "repeat", "arm").unique(maintain_order=True).filter(pl.col("repeat") == 0)
figure = gaps_over_time(tables, points)
study.save_figure(figure, "itl_over_time")

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
