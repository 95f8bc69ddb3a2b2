"""A checkpoint in each number format that is served: bytes held, and how long its steps take.

Begin with `arms`, which says in what formats; `steps` times them in turns, in a process of its own.
"""
