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
# # What is left of goodput under three times the load?
#
# A server that takes everything lets everybody wait. One that predicts the wait refuses what it cannot serve in time,
# and serves the rest.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import (
    draw_cdf,
    draw_fit,
    draw_intervals,
    fit_model,
    fit_table,
    load_study,
    percentile_table,
    rate_table,
    source,
)

study = load_study("overload", os.environ)
tables = study.tables
RATE, BOUND = "workload.rate_per_s", "server.routing.ttft_slo_s"
NO_BOUND_S = 60  # a bound beyond this refuses nothing
source(study.run)

# %%
arm = pl.when(pl.col(BOUND) > NO_BOUND_S).then(pl.lit("takes everything"))
arm = arm.otherwise(pl.format("refuses beyond {} s", BOUND)).alias("arm")
good = rate_table(tables).filter(rate="good requests/s").with_columns(arm)
ttft = percentile_table(tables, "ttft", {"p90": 0.9}).with_columns(arm)
outcomes = tables.requests.with_columns(arm).pivot(
    "outcome", index=["arm", RATE], values="place", aggregate_function="len"
)
outcomes.sort("arm", RATE)

# %% [markdown]
# ## Goodput over load
#
# Good requests a second: completed, within all objectives. The bar is 90% of the peak at three times the capacity.

# %%
figure, (goodput, first) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
draw_intervals(goodput, good, RATE, "arm", "value")
goodput.set(xlabel="offered, requests/s", ylabel="good requests/s", ylim=(0, None))
draw_intervals(first, ttft, RATE, "arm")
first.set(xlabel="offered, requests/s", ylabel="TTFT of what completed, p90, ms", yscale="log")
study.save(figure, "goodput")

# %%
at_most = (
    good.sort(RATE)
    .group_by("arm", maintain_order=True)
    .agg(pl.col("value").max().alias("peak"), pl.col("value").last().alias("at the highest load"))
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
study.save(figure, "refusals")

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
