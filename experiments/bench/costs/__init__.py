"""What single parts cost by themselves: the gateway, a token in it, the router, recording, and each recorded row.

The whole stack under load belongs to `bench.serving`, steps on the device to `bench.steps`.
Begin with `gateway_cost`, whose worker without a model `token_cost` uses too.
"""
