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
# # What are tiers worth?
#
# Agents' sessions whose contexts are four times what the device's pages hold. The arms are explained in `README.md`.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import draw_cdf, load_study, provenance
from moonshard.experiments.studies.tiers.figures import grid_of
from moonshard.experiments.studies.tiers.recorded import arm_of_points, rounds_of

study = load_study("tiers", os.environ)
tables = study.tables
provenance(study.run)

# %% [markdown]
# ## The arms beside the oracle
#
# The oracle is one cache without bound that sees every request in the order in which they were sent.

# %%
rounds = rounds_of(tables)
grid_of(rounds)

# %% [markdown]
# ## TTFT of turns after the first

# %%
later = tables.latencies("ttft", pl.col("turn") > 0)
later = later.with_columns(pl.col("point").replace_strict(arm_of_points(tables)).alias("arm"))
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
draw_cdf(axes, later, "arm")
axes.set(xlabel="TTFT of later turns, ms", xscale="log")
study.save_figure(figure, "ttft")

# %% [markdown]
# ## How long steps take

# %%
study.step_times()
