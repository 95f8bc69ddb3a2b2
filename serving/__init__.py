"""The processes that serve: control plane, engine, KV transfer, worker, gateway, and the commands that start them.

Begin with `control`, which decides, and follow a request: `gateway.pipeline`, `wire`, `worker`, `engine`.
"""
