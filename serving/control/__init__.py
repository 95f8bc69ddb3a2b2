"""The control plane: which requests run in which step, what a handoff does next, which worker a request goes to.

Every class here is a pure state machine: it imports no jax, grpc or asyncio and reads no clock. Whoever drives it says
what happened and at which time, and carries out what it returns. What touches a device belongs in `serving.engine`,
what touches the network in `serving.worker` and `serving.gateway`.
Begin with `request` and `plan`, the shared nouns, then read `batching.scheduler`.
"""
