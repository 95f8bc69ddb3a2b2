"""How large everything of a worker is made, before anything is allocated.

Begin with `sizes`; `memory` asks the machine, `slab_layout` says which device has which part of a block in the slab.
"""
