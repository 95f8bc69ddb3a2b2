"""A worker's process: links to gateways, an engine, handoffs. Knows no gateway. Begin with `process`, then `worker`."""
