"""A worker's process: links to gateways, an engine, and its part of KV handoffs.

It imports nothing of `serving.gateway`. What steps compute belongs in `serving.engine`, what a handoff does next in
`control.handoff`, how bytes move in `serving.transfer`, and messages' translation in `serving.wire`.
Begin with `process`, then `worker`; `links` finds the verb for each message, and `roles` say what each role does with
it.
"""
