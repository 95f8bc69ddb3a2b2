"""Engines that serve on one GPU: prefill and decode in two engines, and both in one.

Single steps and kernels belong to the folder above; servers as users start them, to `bench.serving`.
Begin with `rows`, which runs everything, then `apart`.
"""
