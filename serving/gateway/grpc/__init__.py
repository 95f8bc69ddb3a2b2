"""The public gRPC service, `Inference`.

What HTTP has in common with it belongs in `gateway.intake` and `gateway.pipeline`; gRPC servers as such are in
`rpc.server`.
Begin with `front`; `gate` is what each call passes first.
"""
