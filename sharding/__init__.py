"""Where each part of a weight or of a KV block lies on a mesh of devices, and which bytes go where between two meshes.

Arithmetic only: the bytes themselves are moved by `kv` and `serving.transfer`, and the programs that run on a mesh
belong to `models` and `serving.engine`. Only `mesh`, `shard` and `arrays` need jax or its types; all other files are
pure Python and numpy.
Begin with `shape` (the axes of a mesh) and `rules` (which axis cuts what).
"""
