"""How many workers should prefill, and how many decode.

Whether to split them at all is the question of `studies.pd_vs_aggregated`.
Begin with README.md, then `analysis`.
"""
