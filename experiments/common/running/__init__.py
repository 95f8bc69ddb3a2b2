"""Servers as child processes, as a user starts them, and measurements of them."""
