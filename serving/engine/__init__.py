"""Turns the scheduler's plans into steps of a device, and their results into tokens.

Which step runs next belongs in `control.batching`, a model's mathematics in `models`, and everything that knows a
network in `serving.worker`. `capacity` decides sizes, `compiled` prepares programs before they run.
Begin with `engine`; `programs` runs steps through all stages, and `stage` is the compiled functions of one.
"""
