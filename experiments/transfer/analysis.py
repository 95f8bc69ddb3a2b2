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
# # What of a handoff is exposed?
#
# KV moves while the prompt is still being prefilled, chunk by chunk. Exposed is what is left when the first token is
# there: the rest of the transfer, landing, and joining the batch. `README.md` says what is varied.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import (
    draw_fit,
    draw_waterfall,
    fit_model,
    fit_table,
    load_study,
    source,
    timing_of,
)

study = load_study("transfer", os.environ)
tables = study.tables
PROMPT = "workload.prompt_tokens"
KNOBS = ("server.prefill.chunk_tokens", "server.kv.transport", "server.kv.block_size", "server.kv.slab_bytes")
source(study.run)

# %% [markdown]
# ## Parts of the wait, by point
#
# Medians over requests, in milliseconds. `hidden` is what of the transfer the prefill covered; the share is of TTFT.

# %%
EXPOSED = ("exposed_transfer_ms", "land_ms", "join_ms")
moved = tables.server_requests.filter(pl.col("transfer_ms").is_not_null()).with_columns(
    pl.sum_horizontal(*EXPOSED).alias("exposed_ms"),
    (pl.col("transfer_ms") - pl.col("exposed_transfer_ms")).alias("hidden_ms"),
    (pl.col("ttft_ns") / 1e6).alias("ttft_ms"),
)
parts = moved.group_by("point", PROMPT, *KNOBS, maintain_order=True).agg(
    pl.col("ttft_ms", "transfer_ms", "hidden_ms", *EXPOSED, "exposed_ms", "handoff_gap_ms").median(),
    (pl.col("exposed_ms") / pl.col("ttft_ms")).median().alias("exposed / TTFT"),
    pl.len().alias("requests"),
)
parts.drop("point")

# %% [markdown]
# ## One thing changed at a time
#
# The first point of the sweep is the base; each panel has the points that differ from it in that key alone.

# %%
base = parts.select(KNOBS).row(0, named=True)
figure, panels = plt.subplots(1, len(KNOBS), figsize=(14, 4), sharey=True, layout="constrained")
for axes, knob in zip(panels, KNOBS, strict=True):
    is_own = pl.all_horizontal(pl.col(other) == base[other] for other in KNOBS if other != knob)
    for (prompt_tokens,), own in parts.filter(is_own).sort(knob).group_by(PROMPT, maintain_order=True):
        said = [str(value) for value in own[knob]]
        (line,) = axes.plot(said, own["exposed_ms"], marker="o", label=f"{prompt_tokens} tokens: exposed")
        axes.plot(said, own["handoff_gap_ms"], linestyle="--", color=line.get_color(), label="first to second token")
    axes.set(xlabel=knob.removeprefix("server."), ylim=(0, None))
    axes.grid(alpha=0.3)
panels[0].set_ylabel("ms, median")
panels[0].legend(fontsize="small")
study.save(figure, "exposed")

# %% [markdown]
# ## One request
#
# The median of the base, with the longest prompt: the transfer runs beside the prefill, and a little of it behind.

# %%
longest = moved.filter(pl.all_horizontal(pl.col(knob) == base[knob] for knob in KNOBS))
longest = longest.filter(pl.col(PROMPT) == pl.col(PROMPT).max()).sort("exposed_ms")
figure, axes = plt.subplots(figsize=(11, 3.5), layout="constrained")
draw_waterfall(axes, timing_of(longest.row(longest.height // 2, named=True)))
study.save(figure, "one_request")

# %% [markdown]
# ## What moving costs the devices
#
# Prefill workers export blocks and decode workers land them, both on the device.

# %%
moves = tables.steps.filter(pl.col("kind").is_in(["export", "land"]) & (pl.col("blocks") > 0))
moves.group_by("kind", "server.kv.block_size", "bucket").agg(
    pl.len().alias("steps"),
    (pl.col("device_ns").median() / 1e6).alias("device, ms"),
    (pl.col("device_ns") / pl.col("blocks") / 1e3).median().alias("a block, us"),
).sort("kind", "server.kv.block_size", "bucket")

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
