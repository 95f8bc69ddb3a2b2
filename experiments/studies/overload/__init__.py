"""How many requests are refused, and how many are still served well, when more come than can be served.

Admission is decided in `serving.control`.
Begin with README.md, then `analysis`; `bar` holds the study's criterion.
"""
