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
# # Compare two runs
#
# Change one thing, send the same requests again, and ask what changed, and how sure that is. Here: prefill and decode
# in one process, or in two.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import compare_runs, draw_cdf, load_runs, run_experiment

# %% tags=["parameters"]
NUM_REQUESTS = 24
NUM_REPEATS = 3

# %% [markdown]
# ## An experiment
#
# Short prompts that stream, and now and then a long one. Three repeats, since from one alone nobody knows what would
# have been different the next time.

# %%
folder = Path("results/examples/compare")
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.toml").write_text(f"""
repeats = {NUM_REPEATS}
[workload]
kind = "mixed"
prompt_tokens = [1024, 64]
output_tokens = [16, 96]
weights = [1, 3]
num_requests = {NUM_REQUESTS}
rate_per_s = 2
""")

# %% [markdown]
# ## Two runs of it
#
# The same requests at the same times; `key=value` changes what is served.

# %%
aggregated = run_experiment(folder, "server.mode=aggregated")
disaggregated = run_experiment(folder, "server.mode=disaggregated")

# %% [markdown]
# ## What changed
#
# From A, aggregated, to B, disaggregated, with 95% intervals over the repeats. What differs between two runs has to be
# named, or they are not compared. `compare_runs(...).rows` is the same as a frame.

# %%
compare_runs(aggregated, disaggregated, despite=["server.mode"])

# %% [markdown]
# ## ITL

# %%
tables = load_runs(aggregated, disaggregated)
gaps = tables.latencies("itl").with_columns(
    pl.col("run")
    .replace_strict({aggregated.name: "aggregated", disaggregated.name: "disaggregated"})
    .alias("server.mode")
)
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
draw_cdf(axes, gaps, by="server.mode")
axes.set(xlabel="ITL, ms")
