"""Prefill and decode on workers of their own, against workers that do both.

The same question on one GPU belongs to `experiments.bench.gpu.serving`.
Begin with README.md, then `analysis`; `bar` holds the study's criterion.
"""
