"""What a machine can do, and the least that a step asks of it: the scale that measured times are held against.

What was measured belongs to the part that measured it (`bench.gpu`, `bench.peers`, `bench.profile`).
Begin with `work`.
"""
