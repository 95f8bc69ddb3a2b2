"""Measures again, on the machine at hand, what the table of `models.machines` says of its kind.

Begin with `entries`, which says what is tried and how it is timed; `candidates` does it, in a process of its own.
"""
