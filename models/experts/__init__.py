"""Mixtures of experts: the router, and what runs the chosen experts, on one device or exchanged over a mesh.

Which expert lies on which device is decided in `sharding.experts`; a family's own layers belong to its folder, such as
`models.kimi`.
Begin with `moe`, whose backends share one signature. Backends of kernels are `models.gpu.experts.backend` and
`models.native.experts`, for CPUs.
"""
