"""What a worker does with the messages of gateways: one class for each role, all with the verbs of `role.Role`.

The handoffs of the roles `prefill` and `decode` are driven in `worker.prefill` and `worker.decode`.
Begin with `role`, which refuses what a role does not do. `requests` holds the requests that the engine serves to their
last token, from their prompt or from landed KV.
"""
