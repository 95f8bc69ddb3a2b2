"""Turns what the scheduler plans into steps of a device, and what comes out of them into tokens.

Knows no network. Begin with `engine`; `programs` are the functions that are compiled, `stage` runs them on a mesh.
"""
