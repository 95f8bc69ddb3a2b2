"""The embedded model's EAGLE-3 draft: how it is trained, and how many of its guesses the model takes.

`python -m moonshard.experiments.training.draft.learn` trains and writes it, `...draft.acceptance` measures it.
"""
