"""Tables of requests, steps, tokens and starts, as Parquet files.

Begin with `schema`, every column of every table; `recorder` keeps rows and writes them, `parts` is the files, `steps`
fills the table of steps, and `timeline` draws a recording. What is computed from rows is in `experiments.reading`.
"""
