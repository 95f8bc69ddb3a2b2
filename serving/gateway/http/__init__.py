"""The HTTP front: its routes, and what holds for every exchange.

The shapes of bodies belong in `gateway.openai`, bounds on them in `gateway.intake`, single connections in
`http.connections`.
Begin with `front`, the routes, then `edge`.
"""
