"""A worker's model, from a folder to programs with weights: `model` loads it, `draft` a draft model beside it, and
`holding` says in which form weights lie in memory.
"""
