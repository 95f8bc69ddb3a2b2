"""What is asked of a server, and when. A kind of workload is a file here and an entry in `options`.

Sending the requests belongs to `experiments.runner`; a study's own settings belong to its `config.toml`.
Begin with `plan`.
"""
