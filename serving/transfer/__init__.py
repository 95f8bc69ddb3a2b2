"""Moves KV blocks between workers: the slab, its endpoint, and the transports that carry bytes.

What moves, and when, is decided in `control.handoff`; the pages on the device, the slab's memory and Mooncake are in
`kv`; who owns which part of a block is in `sharding`.
Begin with `plane`. A new transport has the methods of `kv.transfer.Transport` (`kv.inproc` is the shortest there is)
and is made in `transports`. One that needs no gRPC belongs in `kv`, where `publishing` has what every transport needs
whose writes block; `config.faults` must say how it is secured.
"""
