"""What tiers below the device's pages are worth to sessions whose contexts do not fit into these.

How fast each tier is by itself is `experiments.bench.tiers`', which block is given up first `experiments.replay`'s.
Begin with README.md, then `analysis`.
"""
