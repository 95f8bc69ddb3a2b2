"""What notebooks and reports draw.

Figures and their intervals are computed in `reading.tables`; a picture that one study alone needs belongs to its
notebook.
Begin with `plots`.
"""
