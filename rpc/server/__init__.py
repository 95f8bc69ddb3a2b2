"""The server's end of gRPC: who may call, how much may be received, and how a server is built and ended.

Begin with `server`. Services themselves are `serving`'s.
"""
