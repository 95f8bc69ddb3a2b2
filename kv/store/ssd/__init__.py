"""The tier in files.

Begin with `files`; `folder` is whose they are, `extents` their format, `disk` how they are read and written, `space`
which block is where.
"""
