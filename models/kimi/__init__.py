"""Kimi K2 and DeepSeek-V3: one family of models.

What any model needs (experts, attention over pages, products, loading) belongs beside this folder, in `models`;
requests and processes belong to `serving`.
Read in the order `config`, `weights`, `rotary`, `forward`; `footprint` counts bytes, and `family` has the class that
`models.registry` returns.
"""
