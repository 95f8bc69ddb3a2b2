"""How the embedded model was made: texts, training, export, measures.

The model's code belongs to `models`, its files to `models/pocket`, and questions for a served model to
`experiments.evaluation`.
Begin with README.md, then `run/`.
"""
