"""Mixtures of experts: the router and what runs the chosen ones, on one device or exchanged over a mesh.

Begin with `moe`, whose backends share one signature; `grouped` is the one for GPUs. How loads become a placement is
`sharding.experts`' business.
"""
