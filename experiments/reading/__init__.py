"""Reads what runs wrote: tables, intervals, pictures, reports.

Running and writing belong to `experiments.runner`, the studies themselves to `experiments.studies`.
Begin with `study` (what a study's notebook uses); notebooks import all of it through `moonshard.experiments.analysis`.
"""
