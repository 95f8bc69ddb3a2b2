"""`moonshard eval`: held-out questions for a model, and which share it answered right.

The questions are generated in `experiments.training.texts`; speed is measured in `experiments.bench`.
Begin with `command`, then `interview` (asking) and `grading`.
"""
