"""What Mooncake's master says of what it has."""

import http.client
from dataclasses import dataclass

from moonshard.serving.config.loopback import LOOPBACK


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreUsage:
    """As the master counts it, over all clients."""

    num_blocks: int
    bytes_held: int
    bytes_capacity: int
    num_evicted: int


def read_usage(metrics_port: int) -> StoreUsage:
    connection = http.client.HTTPConnection(LOOPBACK, metrics_port, timeout=5.0)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return StoreUsage(
        num_blocks=int(values["master_key_count"]),
        bytes_held=int(values["master_allocated_bytes"]),
        bytes_capacity=int(values["master_total_capacity_bytes"]),
        num_evicted=int(values["master_evicted_key_count"]),
    )
