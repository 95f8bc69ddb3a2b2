"""Models as functions of weights and tokens: configuration, checkpoints, layers, kernels, tokenizers.

Knows neither requests nor processes. Begin with `kimi`. `pocket/` is the embedded model's folder.
"""
