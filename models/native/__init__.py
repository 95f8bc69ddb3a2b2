"""Kernels for CPUs, in C++: XLA copies each weight that it slices out of a stack of layers, these read it in place.

A kernel is a file here, which says what it computes and has a reference in jax beside it, a work file and a binding in
`csrc/`, and a property test in `tests/models/native`. `library` finds what the installation built, and says where it
did not. What runs on GPUs belongs elsewhere (`models.gpu`).
Begin with `library`, then `stacked_product`, the smallest kernel.
"""
