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
from pathlib import Path

import matplotlib.pyplot as plt
import polars as pl
from IPython.display import display

from moonshard.experiments.analysis import (
    Metric,
    StepModel,
    best_table,
    draw_by_kind,
    load_study,
    percentile_table,
    pinned_step_model,
    predicted_ms,
    provenance,
    rate_table,
    trial_rates,
)

study = load_study("ratio", os.environ)
tables = study.tables
provenance(study.run)

# %% tags=["parameters"]
STEP_TIMES = ""  # a file of times of steps; by default that of the first study with pinned workers that has one

# %%
PREFILLS, DECODES = "server.prefill.replicas", "server.decode.replicas"
split = pl.format("{}:{}", PREFILLS, DECODES).alias("prefill:decode")
shape = pl.format("{} in, {} out", "workload.prompt_tokens", "workload.output_tokens").alias("requests")
good = rate_table(tables, "good requests/s").with_columns(split, shape)
done = rate_table(tables, "requests/s").with_columns(split, shape)
ttft = percentile_table(tables, "ttft", {"p90": 0.9}).with_columns(split, shape)
gaps = percentile_table(tables, "itl", {"p90": 0.9}).with_columns(split, shape)
keys = ["requests", "prefill:decode"]
all_of_them = done.select(*keys, pl.col("value").alias("requests/s"))
table = good.select(*keys, pl.col("value").alias("good requests/s"), "low", "high", "num_repeats")
table.join(all_of_them, on=keys, maintain_order="left")

# %% [markdown]
# ## Throughput and latency by split

# %%
PANELS = (
    ("good requests a second", good, "value"),
    ("TTFT, p90, ms", ttft, "ms"),
    ("ITL, p90, ms", gaps, "ms"),
)
figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for axes, (said, table, value) in zip(panels, PANELS, strict=True):
    draw_by_kind(axes, table, "prefill:decode", "requests", value)
    axes.set(xlabel="prefill : decode workers", ylabel=said, ylim=(0, None))
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
study.save_figure(figure, "splits")

# %% [markdown]
# TTFT beside the gap from the first token to the second, in which the transfer shows, in ms.

# %%
SHARES = {"p50": 0.5, "p90": 0.9}
SAID: dict[Metric, str] = {"ttft": "TTFT", "handoff_gap": "handoff gap"}
first_two = pl.concat(
    percentile_table(tables, metric, SHARES).with_columns(pl.lit(said).alias("what")) for metric, said in SAID.items()
)
first_two = first_two.with_columns(split, shape, pl.format("{} {}", "what", "percentile").alias("column"))
first_two.pivot("column", index=keys, values="ms")

# %% [markdown]
# ## The best split here
#
# The one with the most good requests a second. Splits that the repeats do not tell from it are tied with it, and of
# these the one with the lowest p90 ITL is the best.

# %%
good = trial_rates(tables, "good requests/s").with_columns(split, shape)
best = best_table(good, gaps, ["requests"], "prefill:decode")
best.sort("requests")

# %% [markdown]
# ## Which split devices of their own would ask for
#
# Steps that share a core wait for each other, and so what they took here is not what they cost. The times of steps come
# from a study whose workers have a core each (`chunking` or `pd_vs_aggregated`), and are applied to the steps that
# these workers launched: so many seconds of prefill and of decode does a request ask for. A pool gets no more requests
# done than its workers have seconds for: the split whose slower pool gets most done is the prediction, beside the split
# that was best here. Moving KV is left out.

# %%
model = StepModel.from_json(Path(STEP_TIMES).read_bytes()) if STEP_TIMES else pinned_step_model()
if model is None:
    print("No times of steps on cores of their own yet: run the study chunking, and then this notebook again.")
else:
    print(f"Times of steps: {model.source}")
    is_prefill = pl.col("kind") == "prefill"
    steps = predicted_ms(tables.steps, model).with_columns(split, shape)
    PREFILL, DECODE, PREDICTED = "prefill, s a request", "decode, s a request", "predicted, requests/s"
    answered = tables.requests.filter(outcome="completed").with_columns(split, shape)
    answered = answered.group_by(keys).agg(pl.len().alias("num"))
    demand = steps.group_by(*keys, PREFILLS, DECODES, maintain_order=True).agg(
        (pl.col("predicted_ms").filter(is_prefill).sum() / 1e3).alias(PREFILL),
        (pl.col("predicted_ms").filter(~is_prefill).sum() / 1e3).alias(DECODE),
    )
    demand = demand.join(answered, on=keys).with_columns(pl.col(PREFILL, DECODE) / pl.col("num")).drop("num")
    share = pl.col(PREFILL) / (pl.col(PREFILL) + pl.col(DECODE))
    demand = demand.with_columns(
        ((pl.col(PREFILLS) + pl.col(DECODES)) * share).alias("workers that prefill is worth"),
        pl.min_horizontal(pl.col(PREFILLS) / pl.col(PREFILL), pl.col(DECODES) / pl.col(DECODE)).alias(PREDICTED),
    )
    measured = done.select(*keys, pl.col("value").alias("measured, requests/s"))
    display(demand.drop(PREFILLS, DECODES).join(measured, on=keys).sort(keys))
    predicted = demand.sort(PREDICTED, descending=True).group_by("requests", maintain_order=True).first()
    predicted = predicted.select("requests", pl.col("prefill:decode").alias("predicted best"))
    display(predicted.join(best.select("requests", pl.col("best").alias("best here"), "tied with"), on="requests"))

# %% [markdown]
# ## How long steps take

# %%
study.step_times()
