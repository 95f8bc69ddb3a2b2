"""Processes as such: their start, children, status lines, terminal, heap. Begin with `startup` and `supervisor`."""
