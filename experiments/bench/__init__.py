"""`moonshard bench`: how fast the device side and the whole stack are, beside peers and limits.

Experiments that sweep a configuration and record each request belong to `experiments.studies`; what other measurements
need too belongs to `experiments.common`.
Begin with `command`, which runs the parts in their order; `report` prints them.
"""
