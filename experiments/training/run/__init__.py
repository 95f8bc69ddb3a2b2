"""The training itself: recipe, steps, optimiser, checkpoints, journal.

The texts that it learns from belong to `training.texts`; turning a run into a model folder belongs to
`training.export`.
Begin with `train` (the command) and `recipe` (what a run is made of).
"""
