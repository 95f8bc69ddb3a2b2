"""The gateway's process: two fronts, one pipeline, links to workers.

Begin with `process`, then `pipeline.generation`.
"""
