"""Where each part of a weight or of a KV block lies on a mesh of devices, and the way between two meshes.

Begin with `shape`. What reads no device (`layout`, `reshard`, `rules`, `experts`) is pure.
"""
