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
    best_table,
    draw_intervals,
    gaps_over_time,
    load_study,
    percentile_table,
    provenance,
    rate_table,
    trial_rates,
    use_log_scale,
)

study = load_study("chunking", os.environ)
tables = study.tables
CHUNK = "server.prefill.chunk_tokens"
provenance(study.run)

# %% [markdown]
# ## ITL against TTFT
#
# Streams are the requests with short prompts and long outputs; TTFT is that of the long prompts. First the gaps of the
# streams, then the longest of each stream, then TTFT of long prompts and of the streams' short ones.

# %%
is_stream = pl.col("max_tokens") > pl.col("planned_prompt_tokens")
gaps = percentile_table(tables, "itl", where=is_stream)
longest = percentile_table(tables, "max_itl", where=is_stream)
ttft = percentile_table(tables, "ttft", where=~is_stream)
gaps.select(CHUNK, "percentile", "ms", "low", "high", "num_requests", "num_repeats")

# %%
longest.select(CHUNK, "percentile", "ms", "low", "high", "num_requests", "num_repeats")

# %%
ttft.select(CHUNK, "percentile", "ms", "low", "high", "num_requests", "num_repeats")

# %%
short = percentile_table(tables, "ttft", where=is_stream)
short.select(CHUNK, "percentile", "ms", "low", "high", "num_requests", "num_repeats")

# %%
figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
itl, stop, first, good = panels.flat
for axes, table, label in ((itl, gaps, "ITL of streams, ms"), (stop, longest, "longest gap of a stream, ms")):
    draw_intervals(axes, table, CHUNK, "percentile")
    use_log_scale(axes, "y")
    axes.set(ylabel=label)
draw_intervals(first, ttft, CHUNK, "percentile")
first.set(ylabel="TTFT of long prompts, ms", ylim=(0, None))
draw_intervals(good, rate_table(tables, "SLO attainment"), CHUNK, "rate", "value")
good.set(ylabel="SLO attainment", ylim=(0, 1.02))
sizes = sorted(gaps[CHUNK].unique())
for axes in panels.flat:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    axes.set(xlabel="chunk, tokens")
study.save_figure(figure, "itl")

# %% [markdown]
# ## The best size
#
# The one with the most good requests a second. Sizes that the repeats do not tell from it are tied with it, and of
# these the one with the lowest p90 of the streams' ITL is the best.

# %%
best_table(trial_rates(tables, "good requests/s"), gaps, ["run"], CHUNK).drop("run")

# %%
named = [rate_table(tables, rate) for rate in ("good requests/s", "SLO attainment")]
pl.concat(named).select("rate", CHUNK, "value", "low", "high", "num_repeats")

# %% [markdown]
# ## ITL over time
#
# Smallest and largest chunks. Each mark at the bottom is a prefill step, as long as it lasted.

# %%
trials = tables.requests.select("run", "point", "repeat", CHUNK).unique().filter(pl.col("repeat") == 0).sort(CHUNK)
ends = pl.concat([trials.head(1), trials.tail(1)]).unique(maintain_order=True)
figure = gaps_over_time(tables, ends.with_columns(pl.format("chunks of at most {} tokens", CHUNK).alias(CHUNK)))
study.save_figure(figure, "itl_over_time")

# %% [markdown]
# ## How long steps take

# %%
study.step_times()
