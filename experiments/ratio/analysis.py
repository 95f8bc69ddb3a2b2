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
from IPython.display import display

from moonshard.experiments.analysis import (
    load_study,
    percentile_table,
    pinned_step_model,
    predicted_ms,
    provenance,
    rate_table,
)

study = load_study("ratio", os.environ)
tables = study.tables
provenance(study.run)

# %%
PREFILLS, DECODES = "server.prefill.replicas", "server.decode.replicas"
split = pl.format("{}:{}", PREFILLS, DECODES).alias("prefill:decode")
shape = pl.format("{} in, {} out", "workload.prompt_tokens", "workload.output_tokens").alias("requests")
rates = rate_table(tables, "requests/s").with_columns(split, shape)
ttft = percentile_table(tables, "ttft", {"p90": 0.9}).with_columns(split, shape)
tpot = percentile_table(tables, "tpot", {"p90": 0.9}).with_columns(split, shape)
rates.select("requests", "prefill:decode", "value", "low", "high", "num_repeats")

# %% [markdown]
# ## Throughput and latency by split

# %%
PANELS = (
    ("requests a second", rates, "value"),
    ("TTFT, p90, ms", ttft, "ms"),
    ("time per output token, p90, ms", tpot, "ms"),
)
figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for axes, (said, table, value) in zip(panels, PANELS, strict=True):
    for (requests,), own in table.group_by("requests", maintain_order=True):
        bounds = own.select("low", "high").fill_null(float("nan")).to_numpy().T
        errors = abs(bounds - own[value].to_numpy())
        axes.errorbar(own["prefill:decode"], own[value], errors, marker="o", capsize=3, label=str(requests))
    axes.set(xlabel="prefill : decode workers", ylabel=said, ylim=(0, None))
    axes.grid(alpha=0.3)
panels[0].legend(fontsize="small")
study.save_figure(figure, "splits")

# %% [markdown]
# ## Which split devices of their own would ask for
#
# Steps that share a core wait for each other, and so what they took here is not what they cost. The times of steps come
# from a study whose workers have a core each (`chunking` or `pd_vs_aggregated`), and are applied to the steps that
# these workers launched. A pool is done no sooner than its work by its workers: the split whose slower pool is done
# first is the prediction, beside the split that was best here. Moving KV is left out.

# %%
model = pinned_step_model()
if model is None:
    print("No times of steps on cores of their own yet: run the study chunking, and then this notebook again.")
else:
    print(f"Times of steps: {model.source}")
    is_prefill = pl.col("kind") == "prefill"
    steps = predicted_ms(tables.steps, model).with_columns(split, shape)
    demand = steps.group_by("requests", "prefill:decode", PREFILLS, DECODES, maintain_order=True).agg(
        (pl.col("predicted_ms").filter(is_prefill).sum() / 1e3).alias("prefill, s"),
        (pl.col("predicted_ms").filter(~is_prefill).sum() / 1e3).alias("decode, s"),
    )
    slower = pl.max_horizontal(pl.col("prefill, s") / pl.col(PREFILLS), pl.col("decode, s") / pl.col(DECODES))
    share = pl.col("prefill, s") / (pl.col("prefill, s") + pl.col("decode, s"))
    demand = demand.with_columns(slower.alias("slower pool, s"), (4 * share).alias("workers that prefill is worth"))
    measured = rates.select("requests", "prefill:decode", pl.col("value").alias("measured, requests/s"))
    display(demand.drop(PREFILLS, DECODES).join(measured, on=("requests", "prefill:decode")))
    predicted = demand.sort("slower pool, s").group_by("requests", maintain_order=True).first()
    best = measured.sort("measured, requests/s", descending=True).group_by("requests", maintain_order=True).first()
    display(
        predicted.select("requests", pl.col("prefill:decode").alias("predicted best"))
        .join(best.select("requests", pl.col("prefill:decode").alias("best here")), on="requests")
        .sort("requests")
    )

# %% [markdown]
# ## How long steps take

# %%
study.step_times()
