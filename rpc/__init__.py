"""The wire: protobuf messages, their generated code, what gRPC calls have in common at either end, and the clients of
the public API.

It imports no jax and no other package of moonshard. Services belong in `serving`, and so does the translation of the
cluster's messages (`serving.wire`).
Begin with the `.proto` files, then read `status`, the one table of errors; `client` is the public Python API.
"""
