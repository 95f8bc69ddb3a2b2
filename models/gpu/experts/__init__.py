"""Routed experts on Hopper cards: the backend, and products of blocks of tokens with one expert's weights each.

Begin with `backend`, which takes the place of `models.experts.moe.blocks`; then `tiles`, how a product is shared among
processors and warpgroups; `grouped_product` and `packed_product`, the two forms of it; `registers`, how packed weights
become what tensor cores multiply.
"""
