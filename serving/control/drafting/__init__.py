"""Guesses at the tokens that will follow, and when they are worth a try.

`drafter` is what the scheduler sees; `lookup` finds what followed before; `guesses` combines what guesses for one
sequence; `worth` times what a try costs; `fit` tells whether a draft model is of any use.
"""
