"""Messages of the cluster (rpc/link.proto) translated to the control plane's types and back.

Everything that comes over the wire is checked here for what would fail later. The messages and their generated code
belong in `rpc`, the streams that carry them in `worker.link_service` and `gateway.workers`.
Begin with `requests`; `handoffs` has a handoff's messages, and `relayed` what a gateway passes on unread.
"""
