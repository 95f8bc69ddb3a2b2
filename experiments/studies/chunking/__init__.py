"""What the size of a prefill chunk costs, and what it gains for tokens that are being decoded.

How a prompt is cut is decided in `serving.control.batching`.
Begin with README.md, then `analysis`.
"""
