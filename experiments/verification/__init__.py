"""`moonshard verify-tools`: whether a server calls tools when Kimi's own API does, and by the schemas it was given.

The two measures and the files are those of MoonshotAI/K2-Vendor-Verifier. Grading answers that are known belongs to
`experiments.evaluation`.
Begin with `command`, then `samples` (what is asked), `asking`, and `measures`.
"""
