"""Reads what runs wrote: tables, intervals, pictures, reports. `moonshard.experiments.analysis` is its door."""
