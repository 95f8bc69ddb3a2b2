"""The public gRPC service. Begin with `front`; `gate` is what a call passes first."""
