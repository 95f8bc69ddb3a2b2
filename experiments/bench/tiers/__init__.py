"""How fast each tier below the device's pages takes KV blocks and gives them, beside computing them again.

What they are worth to sessions is `experiments.studies.tiers`'.
"""
