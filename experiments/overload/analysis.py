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
)

study = load_study("overload", os.environ)
tables = study.tables
RATE, BOUND = "workload.rate_per_s", "server.routing.ttft_slo_s"
NO_BOUND_S = 60  # a bound beyond this refuses nothing
ALL = "takes everything"
provenance(study.run)

# %%
arm = pl.when(pl.col(BOUND) > NO_BOUND_S).then(pl.lit(ALL))
arm = arm.otherwise(pl.format("refuses beyond {} s", BOUND)).alias("arm")
done = rate_table(tables, "requests/s").with_columns(arm)
is_open = pl.col(RATE).is_not_null()
outcomes = tables.requests.with_columns(arm).pivot(
    "outcome", index=["arm", RATE], values="request_index", aggregate_function="len"
)
outcomes.sort("arm", RATE)

# %% [markdown]
# ## The capacity
#
# Is what the arm that takes everything completes a second while clients wait for it: the closed loop. Loads are told by
# it, and by what they really offered.

# %%
(capacity,) = done.filter(~is_open, pl.col("arm") == ALL)["value"]
load = (pl.col("offered_per_s") / capacity).alias("offered / capacity")
offered = offered_table(tables).select("run", "point", "offered_per_s", load)
low, *_, high = sorted(offered["offered / capacity"].to_list())
is_whole = low <= 0.6 and high >= 2.8
print(f"Capacity: {capacity:.2f} requests/s. The loads are {low:.2f} to {high:.2f} times as much.")
print("They reach from half to three times." if is_whole else "They do NOT reach from half to three times: set others.")

# %% [markdown]
# ## Good requests over load
#
# Completed a second, within all objectives. The bar is 90% of the peak at three times the capacity.

# %%
good = rate_table(tables, "good requests/s").with_columns(arm).join(offered, on=("run", "point"))
ttft = percentile_table(tables, "ttft", {"p90": 0.9}).with_columns(arm).join(offered, on=("run", "point"))
figure, (rate, first) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
draw_intervals(rate, good, "offered / capacity", "arm", "value")
rate.set(ylabel="good requests/s", ylim=(0, None))
draw_intervals(first, ttft, "offered / capacity", "arm")
first.set(ylabel="TTFT of what completed, p90, ms", yscale="log")
study.save_figure(figure, "good_requests")

# %%
COLUMNS = ("arm", "offered / capacity", "offered_per_s", "value", "low", "high", "num_repeats")
good.sort("arm", "offered / capacity").select(COLUMNS)

# %%
at_most = (
    good.sort("offered / capacity")
    .group_by("arm", maintain_order=True)
    .agg(
        pl.col("value").max().alias("peak"),
        pl.col("value").last().alias("at the highest load"),
        pl.col("offered / capacity").last(),
    )
)
at_most.with_columns((pl.col("at the highest load") / pl.col("peak")).alias("share of the peak"))

# %% [markdown]
# ## How long it takes to be refused
#
# Whoever is refused should know at once.

# %%
refused = tables.requests.with_columns(arm).filter(pl.col("outcome") != "completed")
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
draw_cdf(axes, refused.select("arm", pl.col("e2e_ms").alias("ms")), "arm")
axes.set(xlabel="ms until it is refused")
study.save_figure(figure, "refusals")

# %% [markdown]
# ## What the load generator took
#
# It and the gateway run on the workers' cores.

# %%
processor_time(tables).with_columns(arm).pivot("process", index=["arm", RATE], values="cores")

# %% [markdown]
# ## How long steps take

# %%
study.step_times()
