"""Which workers there are: those that have registered (`roster`), and of those that are there what they agree on and
which takes a leg of a request (`fleet`). Pure. Which of several it is belongs in `control.routing`.
"""
