"""A worker's process: links to gateways, an engine, handoffs. Knows no gateway.

Begin with `process`, then `worker`; `links` finds the verb for each message, and `roles` say what each role does of it.
"""
