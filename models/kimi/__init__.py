"""Kimi K2 and DeepSeek-V3: one family, read in the order config, weights, rotary, forward; footprint counts its bytes.

`family` has the class that the registry gives. What any model needs (experts, attention over pages, products, loading)
lies beside this folder and belongs there; requests and processes belong to `serving`.
"""
