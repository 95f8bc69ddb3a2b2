"""KV-cache blocks: who holds which, what their pages look like on a device, and how they are moved between machines.

Knows no request and no server. Begin with `blocks`, the pool, and `prefix`, the names of what blocks hold; `transfer`
is what every transport does.
"""
