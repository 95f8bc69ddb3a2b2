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
# # One request, and where its time went
#
# This notebook starts a server with the embedded model, asks it over gRPC, and draws the answer's milliseconds.

# %%
import matplotlib.pyplot as plt
import polars as pl

from moonshard.experiments.analysis import draw_waterfall, start_server
from moonshard.rpc.client import Client

# %% [markdown]
# A prefill worker, a decode worker and a gateway, each a process of its own. They end with the notebook, or when
# `server` is closed.

# %%
server = start_server()
client = Client(server.grpc)
client.model_info()

# %% [markdown]
# ## Ask
#
# The client loads neither jax nor the server. A stream gives each token when it comes.

# %%
document = (
    "Contact list\nThe city of Tara Koch is York.\nThe city of Willi Nash is Accra.\nThe city of Iris Cook is Turin."
)
chat = [{"role": "user", "content": f"{document}\n\nPlease find the city of Willi Nash."}]
with client.stream(chat, max_tokens=48, temperature=0) as stream:
    text = "".join(delta.text for delta in stream)
print(text)

# %% [markdown]
# ## What it took
#
# The summary at the end of a stream has the gateway's own account. Its phases follow each other and add up to it all.

# %%
timing = stream.summary.timing
phases = timing.phases()
pl.DataFrame({"phase": [*phases, "together", "e2e_ms"], "ms": [*phases.values(), sum(phases.values()), timing.e2e_ms]})

# %% [markdown]
# ## The same as a picture
#
# Below the gateway's lane is what workers did meanwhile: this prompt's KV went from one to the other.

# %%
figure, axes = plt.subplots(figsize=(11, 3), layout="constrained")
draw_waterfall(axes, timing)

# %%
client.close()
server.close()
