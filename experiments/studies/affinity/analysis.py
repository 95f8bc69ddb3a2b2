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
# # What is affinity worth?
#
# Each turn of an agent resends its whole context. Whoever had the turn before computes what is new, any other worker
# all of it, or most. The arms are explained in `README.md`.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import colour, draw_cdf, load_study, provenance
from moonshard.experiments.studies.affinity.recorded import arm_of_points, rounds_of
from moonshard.experiments.studies.affinity.report import grid_of, thoughts_grid_of

study = load_study("affinity", os.environ)
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
# ## Thoughts of earlier turns
#
# Sessions of a model that thinks before each turn, by the policy `cost`: its template drops thoughts up to the last
# answer that calls no tool, or keeps all of them.

# %%
thoughts_grid_of(rounds)

# %% [markdown]
# ## TTFT of turns after the first

# %%
later = tables.latencies("ttft", pl.col("turn") > 0)
later = later.with_columns(pl.col("point").replace_strict(arm_of_points(tables)).alias("arm"))
figure, (ttft, load) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
draw_cdf(ttft, later, "arm")
ttft.set(xlabel="TTFT of later turns, ms")
for index, one in enumerate(rounds):
    shares = sorted(tokens / sum(one.computed_tokens.values()) for tokens in one.computed_tokens.values())
    left = 0.0
    for worker, share in enumerate(shares):
        load.barh(index, share, left=left, color=colour(worker))
        left += share
load.set_yticks(range(len(rounds)), [f"{one.arm}, repeat {one.number + 1}" for one in rounds])
load.invert_yaxis()
load.set(xlabel="share of the tokens computed, by prefill worker", xlim=(0, 1))
study.save_figure(figure, "affinity")

# %% [markdown]
# ## How long steps take

# %%
study.step_times()
