"""Measurement: workloads, runs and studies, the benchmark, the evaluation, and how the embedded model was trained.

Serving imports nothing from here. What a server records about itself belongs to `serving.observe`, and tests of these
tools to `tests/experiments`.
Begin with README.md, then `runner/` (how an experiment runs). Notebooks import `analysis`.
"""
