"""The shells that move KV blocks between workers: slabs, endpoints, transports. What moves when is `control.handoff`'s.

Begin with `plane`; a transport is made in `transports`.
"""
