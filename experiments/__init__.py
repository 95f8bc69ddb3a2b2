"""Measurement: workloads, runs and studies, the benchmark, the evaluation, and how the embedded model was trained.

Serving imports nothing from here. Begin with README.md; `analysis` is what notebooks import.
"""
