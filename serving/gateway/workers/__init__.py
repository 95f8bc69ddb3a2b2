"""The workers as a gateway sees them: links, sessions, and what they have said.

Which worker is chosen is decided in `control.dispatch`, to which `knowledge` passes on what workers say.
Begin with `pool`.
"""
