"""Where the time of a step goes, operation by operation, from XLA's own profile, beside the least that each part needs.

What a step is made of belongs to the model and to `serving.engine.compiled`; whole steps are timed in `bench.steps`.
Begin with `measure`.
"""
