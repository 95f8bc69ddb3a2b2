"""The configuration: its keys, where they are read from, which values do not fit together, and the keys of cluster and
tenants.

Nothing here loads jax or numpy. What only a loaded model can tell (whether a pool fits) belongs in `engine.capacity`.
Begin with `keys`: a new key is a field there.
"""
