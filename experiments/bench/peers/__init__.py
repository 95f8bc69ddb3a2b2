"""What our figures are compared with: Hugging Face transformers, and a checkpoint of Kimi K2's proportions.

Our own measurements belong to `bench.serving` and `bench.steps`. `huggingface` runs in an environment of its own and
imports nothing of moonshard.
Begin with `peer`, which starts it.
"""
