"""EAGLE-3 drafts: one layer that reads three layers of a target, in the hub's folders, with Llama's attention or MLA.

`folder` opens one for a target; `draft` is what it gives, a `models.draft.Draft`: rows, KV and use are told there.
Sources: EAGLE-3 (arXiv 2503.01840); EAGLE-3.1's norms as SpecForge writes them (`fc_norm`, `norm_output`).
"""
