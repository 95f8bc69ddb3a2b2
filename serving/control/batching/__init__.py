"""The scheduler of one worker: which requests its next step computes, and in which slots and blocks.

How a plan becomes a step of the device belongs in `serving.engine`; which worker a request goes to, in
`control.dispatch` and `control.routing`; blocks themselves are counted in `kv.blocks`.
Begin with `scheduler`; it asks one `partition` after another, and `admission` says who gets a free slot.
"""
