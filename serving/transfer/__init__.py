"""The shells that move KV blocks between workers: slabs, endpoints, transports. What moves when is `control.handoff`'s.

Begin with `plane`; a new transport has the methods of `kv.transfer.Transport` (`kv.inproc` is the shortest there
is) and is made in `transports`.
"""
