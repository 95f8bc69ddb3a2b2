"""What is refused, and what is still good, when more comes than can be served."""
