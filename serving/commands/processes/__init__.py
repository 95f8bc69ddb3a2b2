"""The commands that run one process of a deployment alone. `serve` starts all of them as its children."""
