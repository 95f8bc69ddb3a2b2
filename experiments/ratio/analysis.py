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
# # How many workers should prefill?
#
# Four workers on two cores. The split that is best depends on how long prompts are beside their outputs; `README.md`
# says what sharing cores means for this question.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import (
    draw_fit,
    fit_model,
    fit_table,
    load_study,
    percentile_table,
    rate_table,
    source,
)

study = load_study("ratio", os.environ)
tables = study.tables
source(study.run)

# %%
split = pl.format("{}:{}", "server.prefill.replicas", "server.decode.replicas").alias("prefill:decode")
shape = pl.format("{} in, {} out", "workload.prompt_tokens", "workload.output_tokens").alias("requests")
rates = rate_table(tables).with_columns(split, shape)
ttft = percentile_table(tables, "ttft", {"p90": 0.9}).with_columns(split, shape)
tpot = percentile_table(tables, "tpot", {"p90": 0.9}).with_columns(split, shape)
rates.filter(rate="requests/s").select("requests", "prefill:decode", "value", "low", "high", "num_repeats")

# %% [markdown]
# ## Throughput and latency by split

# %%
PANELS = (
    ("requests a second", rates.filter(rate="requests/s"), "value"),
    ("TTFT, p90, ms", ttft, "ms"),
    ("time per output token, p90, ms", tpot, "ms"),
)
figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for axes, (said, table, value) in zip(panels, PANELS, strict=True):
    for (requests,), own in table.group_by("requests", maintain_order=True):
        axes.plot(own["prefill:decode"], own[value], marker="o", label=str(requests))
    axes.set(xlabel="prefill : decode workers", ylabel=said, ylim=(0, None))
    axes.grid(alpha=0.3)
panels[0].legend(fontsize="small")
study.save(figure, "splits")

# %% [markdown]
# ## Which split the work itself asks for
#
# The device time that prefill and decode took, whichever worker took it. On devices that share nothing, pools are best
# split as this time is: `prefill's share` of four workers.

# %%
is_prefill = pl.col("kind") == "prefill"
busy = tables.steps.with_columns(split, shape).group_by("requests", "prefill:decode", maintain_order=True)
demand = busy.agg(
    (pl.col("device_ns").filter(is_prefill).sum() / 1e9).alias("prefill, s"),
    (pl.col("device_ns").filter(~is_prefill).sum() / 1e9).alias("decode and moving, s"),
)
share = pl.col("prefill, s") / (pl.col("prefill, s") + pl.col("decode and moving, s"))
demand.with_columns(share.alias("prefill's share"), (4 * share).alias("of four workers"))

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
