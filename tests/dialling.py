"""How tests call workers: as a gateway of the cluster, whose key is that of all that tests start."""

import functools
import os
from pathlib import Path

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.server.door import call_once, open_stream
from moonshard.serving.config.cluster_key import ClusterKey, cluster_key
from moonshard.serving.config.keys import Config, ModelConfig
from moonshard.serving.gateway.workers.link import METHOD as LINK

INSPECT = LINK.replace("/Link", "/Inspect")


@functools.cache
def own_key() -> ClusterKey:
    return cluster_key(Config(model=ModelConfig(path=Path(), name="any")), os.environ)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def open_link(channel: grpc.aio.Channel, address: str) -> grpc.aio.StreamStreamCall:
    """A Link that was let in, on which nothing has been said yet. `address` is the channel's."""
    return await open_stream(channel, LINK, own_key().proofs, port_of(address), link_pb2.WorkerMessage.FromString)


def inspect(
    address: str, credentials: grpc.ChannelCredentials | None = None, timeout_s: float = 10.0
) -> link_pb2.Inspection:
    """The worker's state. RpcError where nobody answers."""
    is_plain = credentials is None
    with grpc.insecure_channel(address) if is_plain else grpc.secure_channel(address, credentials) as channel:
        port = port_of(address) if is_plain else 0
        answer = call_once(channel, INSPECT, own_key().proofs, port, link_pb2.InspectRequest(), timeout_s=timeout_s)
    return link_pb2.Inspection.FromString(answer)
