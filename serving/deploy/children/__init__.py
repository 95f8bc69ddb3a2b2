"""Processes that this one has started: one, one place that is filled again and again, and all of a deployment."""
