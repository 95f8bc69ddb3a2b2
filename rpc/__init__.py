"""The wire: messages, their generated code, and what gRPC calls have in common on either side.

Imports no jax and nothing of the rest. Begin with the `.proto` files, then `status`, the one table of errors.
"""
