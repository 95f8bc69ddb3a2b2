"""The processes that serve: control plane, engine, KV transfer, worker, gateway, and the commands that start them.

What is computed belongs in `models`, KV blocks and slabs in `kv`, messages in `rpc`, load and measurements in
`experiments`.
Begin with `control`, which decides, then follow a request: `gateway.pipeline`, `wire`, `worker`, `engine`.
"""
