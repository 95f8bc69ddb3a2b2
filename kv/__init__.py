"""KV-cache blocks: who holds which, what their pages look like on a device, and how bytes move between processes.

What belongs here knows no request, no model and no server. Deciding when a transfer begins or is given up belongs to
`serving.control.handoff`, moving KV for a running worker to `serving.transfer`, and layouts of blocks over meshes to
`sharding`.
Begin with `blocks` (the pool), then `prefix` (the names of what blocks hold) and `transfer` (what every transport
does).
"""
