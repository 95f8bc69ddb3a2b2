"""The server's end of gRPC: who may call, how much may be received, and how a server is built and ended.

The services themselves belong in `serving`.
Begin with `server`; `door` is the proof that both ends hold the cluster's key.
"""
