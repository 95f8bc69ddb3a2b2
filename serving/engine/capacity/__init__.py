"""How large everything of a worker is made, decided before anything is allocated.

Allocating it belongs in `engine.loading.model` and `engine.stage`.
Begin with `sizes`; `memory` asks the machine, and `slab_layout` says which device has which part of a block in the
slab.
"""
