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
# # Replay a trace
#
# A trace says when requests came, how long they were, and what they have in common. This notebook makes one up in the
# public format of Mooncake's traces, replays it against the embedded model, and looks at what came of it. If you have a
# trace of your own, put its path into the cell below that writes `config.toml`.

# %%
from pathlib import Path

import matplotlib.pyplot as plt

from moonshard.experiments.analysis import draw_cdf, draw_gaps_over_time, load_runs, percentile_table, run_experiment
from moonshard.experiments.common.trace_file import write_trace
from moonshard.experiments.replay.synthetic import agent_trace

# %% tags=["parameters"]
NUM_REQUESTS = 200
NUM_SESSIONS = 40

# %% [markdown]
# ## A trace
#
# Agents that come again and again with all of their context and something new. Each begins with one of five system
# prompts; the numbers in `hash_ids` say which blocks of 512 tokens are the same.

# %%
folder = Path("results/examples/replay")
folder.mkdir(parents=True, exist_ok=True)
requests = agent_trace(NUM_SESSIONS, num_turns=6)[:NUM_REQUESTS]
write_trace(folder / "trace.jsonl", requests)
(folder / "trace.jsonl").read_text().splitlines()[:3]

# %% [markdown]
# ## An experiment
#
# Is a folder with a `config.toml`. The trace is made to fit: a quarter of its lengths, and twelve times as fast.

# %%
(folder / "config.toml").write_text("""
[server]
mode = "disaggregated"

[workload]
kind = "trace"
path = "trace.jsonl"
length_scale = 0.25
time_scale = 0.08
clips = true
""")
run = run_experiment(folder)

# %% [markdown]
# ## What came of it
#
# Every request is a row, and so is every step of a device.

# %%
tables = load_runs(run)
tables.requests.select(
    "request_index", "outcome", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_ms", "e2e_ms"
).head()

# %%
tables.requests.select("prompt_tokens", "cached_tokens", "completion_tokens").sum()

# %%
percentile_table(tables, "ttft")

# %%
figure, (first, between) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
draw_cdf(first, tables.latencies("ttft"))
first.set(xlabel="TTFT, ms")
draw_gaps_over_time(between, tables, run.name, point=0, repeat=0)
