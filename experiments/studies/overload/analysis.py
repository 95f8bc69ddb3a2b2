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
# # What is left of good requests under three times the load?
#
# A server that takes everything lets everybody wait. One that predicts the wait refuses what it cannot serve in time,
# and serves the rest.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import (
    draw_cdf,
    draw_intervals,
    load_study,
    offered_table,
    percentile_table,
    processor_time,
    provenance,
    rate_table,
    trial_rates,
    use_log_scale,
)
from moonshard.experiments.studies.overload.bar import verdict

study = load_study("overload", os.environ)
tables = study.tables
LOAD, BOUND = "workload.times_capacity", "server.routing.ttft_slo_s"
NO_BOUND_S = 60  # a bound beyond this refuses nothing
ALL = "takes everything"
provenance(study.run)

# %%
arm = pl.when(pl.col(BOUND) > NO_BOUND_S).then(pl.lit(ALL))
arm = arm.otherwise(pl.format("refuses beyond {} s", BOUND)).alias("arm")
is_open = pl.col(LOAD).is_not_null()

# %% [markdown]
# ## The capacity
#
# Is what the arm that takes everything completes a second while clients wait for it: the closed loop, the first point
# of each repeat. All loads of the repeat are told by it.

# %%
rate_table(tables, "requests/s").with_columns(arm).filter(~is_open).select("arm", "value", "low", "high", "num_repeats")

# %% [markdown]
# What the open loops offered, the mean of the repeats, each of which has a capacity of its own.

# %%
offered_table(tables).with_columns(arm).select("arm", LOAD, "offered_per_s").sort("arm", LOAD)

# %% [markdown]
# ## What became of the requests
#
# By the load as a multiple of the capacity; the closed loop has none.

# %%
tables.requests.with_columns(arm).pivot(
    "outcome", index=["arm", LOAD], values="request_index", aggregate_function="len"
).sort("arm", LOAD)

# %% [markdown]
# ## Good requests over load
#
# Completed within all objectives, a second, from the time of the first request to the end of the last. Bands are 95%
# intervals over the repeats.

# %%
good = rate_table(tables, "good requests/s").with_columns(arm).filter(is_open)
ttft = percentile_table(tables, "ttft", {"p90": 0.9}).with_columns(arm).filter(is_open)
figure, (rate, first) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
draw_intervals(rate, good, LOAD, "arm", "value")
rate.set(xlabel="offered load, times the capacity", ylabel="good requests/s", ylim=(0, None))
draw_intervals(first, ttft, LOAD, "arm")
first.set(xlabel="offered load, times the capacity", ylabel="TTFT of what completed, p90, ms")
use_log_scale(first, "y")
study.save_figure(figure, "good_requests")

# %%
good.select("arm", LOAD, "value", "low", "high", "num_repeats").sort("arm", LOAD)

# %% [markdown]
# TTFT of what completed, p90 in ms, and the gap from the first token to the second, in which the transfer shows.

# %%
second = percentile_table(tables, "handoff_gap", {"p90": 0.9}).with_columns(arm).filter(is_open)
ttft.select("arm", LOAD, pl.col("ms").alias("TTFT p90"), "low", "high", "num_repeats").join(
    second.select("arm", LOAD, pl.col("ms").alias("handoff gap p90")), on=["arm", LOAD]
).sort("arm", LOAD)

# %% [markdown]
# ## The bar
#
# At three times the capacity at least 0.9 of the peak, which is the highest mean of any load.

# %%
trials = trial_rates(tables, "good requests/s").with_columns(arm).filter(is_open)
for (name,), own in trials.group_by("arm", maintain_order=True):
    print(verdict(str(name), own, LOAD))

# %% [markdown]
# ## How long it takes to fail
#
# Whoever is refused should know at once. What did not complete for another reason is in here too.

# %%
refused = tables.requests.with_columns(arm).filter(pl.col("outcome") != "completed")
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
draw_cdf(axes, refused.select("arm", pl.col("e2e_ms").alias("ms")), "arm")
axes.set(xlabel="time until a request that did not complete ended, ms", ylabel="share of those")
study.save_figure(figure, "refusals")

# %% [markdown]
# ## What the load generator took
#
# It and the gateway run on the workers' cores.

# %%
processor_time(tables).with_columns(arm).pivot("process", index=["arm", LOAD], values="cores")

# %% [markdown]
# ## How long steps take

# %%
study.step_times()
