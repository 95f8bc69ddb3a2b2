"""Runs as tables, and what is computed from them."""
