"""Bounds on requests' bodies, for both fronts, before they are decoded.

What the fields of a body may be belongs in `gateway.openai` and `gateway.request`.
Begin with `bounds`.
"""
