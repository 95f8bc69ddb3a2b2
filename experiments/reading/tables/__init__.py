"""Runs as tables, and what is computed from them: latencies, goodput, comparisons.

Drawing belongs to `reading.pictures`, intervals as plain numbers to `experiments.common.intervals`.
Begin with `frames` (files to polars), then `run_tables`.
"""
