"""Guesses at the tokens that will follow, which cost no weights, and when they are worth a try.

`drafter` is what the scheduler sees, `lookup` finds what followed before, and `guesses` combines what guesses for one
sequence and keeps account of how often it is right.
"""
