"""`moonshard router-replay`: the router alone over a trace, without workers.

The router and its policies belong to `serving.control.routing`; what routing costs in time is measured in
`experiments.bench.costs.routing`.
Begin with `replay`.
"""
