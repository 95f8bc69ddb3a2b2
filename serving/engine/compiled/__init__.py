"""Programs before they run: traced, lowered, compiled, kept on disk and found again.

What a program computes belongs in `engine.stage`.
Begin with `preparation`; `store` keeps programs under the keys of `digest`, `lowering` compiles a step without any
weights, and `reading` reads the weights meanwhile.
"""
