"""Where KV blocks are kept beyond the device's pages: tiers, and what they have in common.

Begin with `tier`, what every tier promises, and `stack`, several of them as one. `host` is this process's memory, `ssd`
are files of our own, `mooncake` is memory beside the workers that all of them share; `retention` and
`hit_density` say which block goes first. What goes down and what comes up is decided in `serving.control.tiers`.
"""
