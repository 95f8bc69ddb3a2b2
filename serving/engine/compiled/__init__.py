"""Programs before they run: declared, traced, lowered, compiled, kept on disk and found again.

Begin with `blueprint`, which says what programs a stage has, and `bodies`, what they do. `preparation` makes them;
`store` keeps them under the keys of `digest`, `lowering` compiles a step without any weights, and `reading` reads the
weights meanwhile.
"""
