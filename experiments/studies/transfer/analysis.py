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
    draw_by_kind,
    draw_waterfall,
    latency_interval,
    load_study,
    median_table,
    provenance,
    timing_of,
    use_log_scale,
)

study = load_study("transfer", os.environ)
tables = study.tables
PROMPT = "workload.prompt_tokens"
KNOBS = ("server.prefill.chunk_tokens", "server.kv.transport", "server.kv.block_size", "server.kv.slab_bytes")
provenance(study.run)

# %% [markdown]
# ## Parts of the wait, by point
#
# Medians over requests, in milliseconds. `hidden` is what of the transfer the prefill covered; the share is of TTFT.
# The tables below have 95% intervals over repeats: of what is exposed, and of the gap from first to second token.

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

# %%
keys = ("point", PROMPT, *KNOBS)
exposed, handoff_gaps = (
    median_table(moved, keys, column, latency_interval) for column in ("exposed_ms", "handoff_gap_ms")
)
exposed.drop("point")

# %%
handoff_gaps.drop("point")

# %% [markdown]
# ## One thing changed at a time
#
# The first point of the sweep is the base; each panel has the points that differ from it in that key alone.

# %%
UNITS = dict(zip(KNOBS, ("chunk, tokens", "transport", "block, tokens", "slab, MiB"), strict=True))
base = parts.select(KNOBS).row(0, named=True)
figure, panels = plt.subplots(1, len(KNOBS), figsize=(14, 4), sharey=True, layout="constrained")
for axes, knob in zip(panels, KNOBS, strict=True):
    is_own = pl.all_horizontal(pl.col(other) == base[other] for other in KNOBS if other != knob)
    for table, column, style in ((exposed, "exposed_ms", "-"), (handoff_gaps, "handoff_gap_ms", "--")):
        said = pl.format(f"{{}} tokens: {column.removesuffix('_ms').replace('_', ' ')}", PROMPT).alias("said")
        own = table.filter(is_own).sort(PROMPT, knob).with_columns(said)
        if knob.endswith("_bytes"):
            own = own.with_columns((pl.col(knob) / 2**20).round(1))
        draw_by_kind(axes, own, knob, "said", column, linestyle=style)
    use_log_scale(axes, "y")
    axes.set(xlabel=UNITS[knob])
panels[0].set_ylabel("ms, median with 95% interval")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
study.save_figure(figure, "exposed")

# %% [markdown]
# ## One request
#
# The median of the base, with the longest prompt: the transfer runs beside the prefill, and a little of it behind.

# %%
longest = moved.filter(pl.all_horizontal(pl.col(knob) == base[knob] for knob in KNOBS))
longest = longest.filter(pl.col(PROMPT) == pl.col(PROMPT).max()).sort("exposed_ms")
figure, axes = plt.subplots(figsize=(11, 3.5), layout="constrained")
draw_waterfall(axes, timing_of(longest.row(longest.height // 2, named=True)))
study.save_figure(figure, "one_request")

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
study.step_times()
