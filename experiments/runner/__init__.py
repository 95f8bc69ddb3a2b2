"""Runs an experiment: its points, its trials, and the files that each trial writes.

What is asked belongs to `experiments.workload`, reading the files afterwards to `experiments.reading`.
Begin with `experiment` (what a configuration means), then `run` and `trial`.
"""
