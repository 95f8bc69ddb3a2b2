"""Lessons in which tools are called."""
