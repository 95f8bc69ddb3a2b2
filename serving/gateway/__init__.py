"""The gateway's process: the HTTP and gRPC fronts, one pipeline behind both, and links to workers.

It imports nothing of `serving.worker`. Which worker a request goes to, and what follows a failure, is decided in
`control.dispatch` and `control.routing`.
Begin with `process`, then read `pipeline.generation`.
"""
