"""Which KV blocks go down to slower tiers and which come up from them, as pure state machines.

Begin with `fetches`: what is fetched for a request, and how long it may wait for that. `writes` is the queue of what
goes down, in `piece`s, and `aside` what one tier lacks of that. What the tiers are is in `kv.store`; what moves the
bytes is in `serving.worker.store`.
"""
