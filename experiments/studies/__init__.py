"""The committed studies: each folder has a configuration, a notebook, its pictures and what was found.

What more than one study needs belongs to `experiments.reading`; a new kind of request belongs to
`experiments.workload`.
Begin with a study's README.md, then its `config.toml` and `analysis`.
"""
