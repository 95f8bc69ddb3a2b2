"""What our figures are compared with: other servers, Hugging Face transformers, checkpoints of Kimi K2's proportions
and of its widths.

Our own measurements in more detail belong to `bench.serving` and `bench.steps`. Servers of others are only asked, never
built or started. `huggingface` runs in an environment of its own and imports nothing of moonshard; `peer` starts it.
Begin with `beside`, then `compare`.
"""
