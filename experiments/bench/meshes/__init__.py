"""What meshes cost: collectives, idle stages, planning the way between two meshes, and handoffs between them.

All devices are virtual ones of the CPU; times on a GPU belong to `bench.gpu`. How a mesh is cut is decided in
`sharding`.
Begin with `measure`.
"""
