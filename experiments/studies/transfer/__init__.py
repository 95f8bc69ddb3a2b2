"""How long moving KV takes, and how much of that time a client waits for.

Bare GB/s of the transports belong to `experiments.bench.transfer`.
Begin with README.md, then `analysis`.
"""
