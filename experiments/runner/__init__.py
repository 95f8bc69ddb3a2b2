"""Runs an experiment: its points, its trials, what each writes. Begin with `experiment` and `run`."""
