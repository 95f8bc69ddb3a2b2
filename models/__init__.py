"""Models as functions of weights and tokens: configuration, checkpoints, layers, kernels, sampling, tokenizers.

Nothing here knows requests, processes or networks: these belong to `serving`. How a leaf is cut over a mesh belongs to
`sharding`, blocks and pages of the KV cache to `kv`, and how the embedded model was trained to `experiments.training`.
Begin with `model` (what a model promises), then `kimi/` (the family that is served). `machines` says how much is best
computed at once, and `pocket/` holds the embedded model's files.
"""
