"""The whole stack as its clients see it."""
