"""Attention over paged latents on Hopper cards: a file for each form of it, and files for the tiles of each.

Begin with `latent`, for decoding, then `expanded`, for long prompts.
"""
