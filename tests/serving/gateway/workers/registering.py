"""A gateway's registry on loopback over a pool that nobody has told of workers, and ways to register there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.server.door import open_stream
from moonshard.rpc.tls import TlsFiles
from moonshard.serving.config.keys import RoutingConfig
from moonshard.serving.gateway.workers.dispatching import dispatcher_of
from moonshard.serving.gateway.workers.knowledge import Knowledge
from moonshard.serving.gateway.workers.pool import LinkPool, PoolEvents
from moonshard.serving.gateway.workers.registry import SERVICE, Registry, registry_server, serving_registry
from tests.dialling import own_key, port_of
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import HANG_S

REGISTER = f"/{SERVICE.full_name}/Register"
NOBODY = PoolEvents(on_load=lambda *_: None, on_handoff=lambda *_: None, on_lost=lambda *_: None)
LEASE_S = 60.0


@asynccontextmanager
async def registry_over(
    *, lease_s: float = LEASE_S, events: PoolEvents = NOBODY, port: int = 0, tls: TlsFiles | None = None
) -> AsyncIterator[tuple[LinkPool, str]]:
    """The pool, and where workers register. What hangs in the block fails."""
    knowledge = Knowledge(dispatcher_of([], RoutingConfig(local_prefill="static")))
    pool = LinkPool([], knowledge, events, silence_s=10.0, key=own_key().proofs)
    registry = Registry(pool, lease_s=lease_s)
    server = registry_server(registry, host="127.0.0.1", port=port, key=own_key().proofs, tls=tls)
    async with asyncio.timeout(HANG_S), pool.running(), serving_registry(registry, server):
        yield pool, f"127.0.0.1:{server.port}"


def announcement(worker: FakeWorker, address: str) -> link_pb2.WorkerNotice:
    return link_pb2.WorkerNotice(announcement=link_pb2.Announcement(address=address, welcome=worker.welcome))


@asynccontextmanager
async def stream_to(registry: str, key: bytes | None = None) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A stream that was let in, on which nothing was said yet; it is broken off after the block."""
    proofs = own_key().proofs if key is None else key
    async with grpc.aio.insecure_channel(registry) as channel:
        yield await open_stream(channel, REGISTER, proofs, port_of(registry), link_pb2.Lease.FromString)
