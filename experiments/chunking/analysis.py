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
# # How large should a chunk be?
#
# A worker that does both prefills long prompts in chunks, between the steps of what streams. Large chunks hold streams
# up, small ones cost the prompt time.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import (
    draw_fit,
    draw_gaps_over_time,
    draw_intervals,
    fit_model,
    fit_table,
    load_study,
    percentile_table,
    rate_table,
    source,
)

study = load_study("chunking", os.environ)
tables = study.tables
CHUNK = "server.prefill.chunk_tokens"
source(study.run)

# %% [markdown]
# ## Jitter against TTFT
#
# Streams are the requests with short prompts and long outputs; TTFT is that of the long prompts.

# %%
is_stream = pl.col("max_tokens") > pl.col("planned_prompt_tokens")
gaps = percentile_table(tables, "itl", where=is_stream)
ttft = percentile_table(tables, "ttft", where=~is_stream)
gaps.select(CHUNK, "percentile", "ms", "low", "high")

# %%
figure, (jitter, first, good) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
draw_intervals(jitter, gaps, CHUNK, "percentile")
jitter.set(xscale="log", yscale="log", ylabel="gap between tokens of streams, ms")
draw_intervals(first, ttft, CHUNK, "percentile")
first.set(xscale="log", ylabel="TTFT of long prompts, ms", ylim=(0, None))
draw_intervals(good, rate_table(tables).filter(rate="in SLO"), CHUNK, "rate", "value")
good.set(xscale="log", ylabel="share within the SLO", ylim=(0, 1.02))
study.save(figure, "jitter")

# %% [markdown]
# ## The same gaps over time
#
# Smallest and largest chunks. Each red mark is a prefill step.

# %%
sizes = tables.requests.select("run", "point", "repeat", CHUNK).unique().filter(pl.col("repeat") == 0).sort(CHUNK)
ends = pl.concat([sizes.head(1), sizes.tail(1)]).unique(maintain_order=True)
figure, panels = plt.subplots(
    ends.height, 1, figsize=(11, 2.6 * ends.height), sharex=True, sharey=True, layout="constrained", squeeze=False
)
for axes, (run, point, repeat, chunk) in zip(panels[:, 0], ends.iter_rows(), strict=True):
    draw_gaps_over_time(axes, tables, run, point, repeat)
    axes.set_title(f"chunks of at most {chunk} tokens")
study.save(figure, "gaps_over_time")

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
