"""Bounds on what a chat template, which is a program, may do and how much time and memory it may take.

How messages become prompt ids belongs in `chat.template`.
Begin with `environment`; `rewriting` makes templates charge for what they do, `costs` says how much, `budget` counts,
`clock` measures.
"""
