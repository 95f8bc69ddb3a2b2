"""The generated conversations that the embedded model learns from, and its tokenizer.

Conversations with tools belong to `texts.tools`. The loop that uses the rows belongs to `training.run`, grading answers
to `experiments.evaluation`.
Begin with `conversation` (what is generated), then `corpus` (rows of tokens).
"""
