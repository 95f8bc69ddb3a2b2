"""The configuration: its keys, where they are read from, what is wrong with them, and the keys of cluster and tenants.

A new key is a field in `keys`. Nothing here loads jax or numpy.
"""
