"""What a worker does of what gateways ask: one class for each role, all with the verbs of `role.Role`.

Begin with `role`, which refuses what a role does not do. `requests` are those that an engine serves from their prompt,
or from their landed KV, to their last token.
"""
