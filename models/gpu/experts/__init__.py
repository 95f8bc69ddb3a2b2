"""Routed experts on Hopper cards: the backend, and the product of blocks of tokens with one expert's weights each.

Begin with `backend`, which takes the place of `models.experts.moe.blocks`.
"""
