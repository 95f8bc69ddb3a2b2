"""What single parts cost by themselves: the gateway, the router, recording, and each recorded row.

The whole stack under load belongs to `bench.serving`, steps on the device to `bench.steps`.
Begin with `gateway_cost`.
"""
