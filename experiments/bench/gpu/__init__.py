"""One GPU: whether its results are right, and how close they come to what the card can do.

What runs on virtual CPU devices belongs to `bench.meshes` and `bench.steps`; gateways and networks are not measured
here. Needs jax and numpy only, so it runs on a bare GPU machine.
Begin with `command`.
"""
