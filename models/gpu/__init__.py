"""Kernels for NVIDIA's Hopper cards, in Pallas for Mosaic GPU: what XLA reads twice, or in loops, is read once.

A kernel is a file of `attention` or `experts`, which says what it computes and has a reference in jax beside it, and a
property test in `tests/models/gpu`, where it is interpreted with race detection and lowered for a card. `card` says
where they run, and why not. Kernels for CPUs are `models.native`'s. Of packed weights only experts have a kernel here:
dense products (attention's projections, dense layers, shared experts) are XLA's, which widens the weight before each.
Begin with `card`; `tensor_cores` is what they have in common.
"""
