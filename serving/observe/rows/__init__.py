"""Tables of requests, steps, tokens and starts, written as Parquet files.

`schema` has every column of every table, `recorder` keeps rows and writes them, `parts` is the files, `steps` fills the
table of steps, and `timeline` draws a recording. The rows of requests are filled in `gateway.records.rows`; what is
computed from rows belongs in `experiments.reading`.
Begin with `schema`.
"""
