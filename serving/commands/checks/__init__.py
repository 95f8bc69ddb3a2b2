"""What commands check before they start processes: the model folder, the ports, and whether a step compiles.

Checks of the configuration by itself belong in `config.faults`.
Begin with `folders`.
"""
