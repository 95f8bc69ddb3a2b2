"""How fast the KV transports move bytes between two processes.

What a client waits for because its KV moves belongs to `bench.serving.handoff`; the transports themselves belong to
`kv` and `serving.transfer`.
Begin with `transports`.
"""
