"""The gateway's two servers: HTTP by uvicorn, and gRPC. They are bound, built and closed here; what they serve is given
to them.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version

import uvicorn
from starlette.types import ASGIApp

from moonshard.rpc.inference_pb2_grpc import add_InferenceServicer_to_server
from moonshard.rpc.server.receive_limiter import ReceiveLimiter
from moonshard.rpc.server.server import BoundServer, PortInUse, build_server
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.config.tenants import Tenants
from moonshard.serving.gateway.grpc.front import JSON_NAMES, NUM_CONTEXTS, SERVICE, InferenceService
from moonshard.serving.gateway.grpc.gate import GrpcGate
from moonshard.serving.gateway.http.connections.protocol import HttpConfig, Timeouts
from moonshard.serving.gateway.http.connections.waiting import Connections, Waiting
from moonshard.serving.gateway.intake.bounds import Intake
from moonshard.serving.gateway.pipeline.generation import Gateway

CLOSE_TIMEOUT_S = 2.0  # for responses whose request has ended, and for clients that do not read them
UNREAD_BYTES = 1 << 16  # of a gRPC message before it is received
MAX_MESSAGE_BYTES = 16 << 20  # of a gRPC message: all streams wait while it is joined, 1 to 2 ms for each MB
HURRIED_TIMEOUT_S = 0.1  # for a gRPC message to arrive where too many are on their way
BACKLOG = 2048
# A client whose machine is gone tells nobody: after a minute of silence it is lost. Not all systems have all names.
KEEP_ALIVE_PROBES = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
}


class UnsignalledServer(uvicorn.Server):
    """uvicorn, leaving signals to the process: it would close at once instead of draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_http(host: str, port: int) -> socket.socket:
    """A listening socket. PortInUse, or OSError for a host that is not this machine's."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        _probe_silent_clients(listener)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port) from error
        raise


def _probe_silent_clients(listener: socket.socket) -> None:
    """Sets keepalive on the listening socket: connections that it accepts inherit it, and silent clients are probed."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_PROBES.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def grpc_front(config: GatewayConfig, gateway: Gateway, intake: Intake, tenants: Tenants) -> BoundServer:
    service = InferenceService(gateway, version=version("moonshard"), tenants=tenants)
    max_message_bytes = min(config.max_body_bytes, MAX_MESSAGE_BYTES)
    max_patient = max(1, config.max_bytes_in_flight // max_message_bytes)
    limiter = ReceiveLimiter(max_patient, timeout_s=config.body_timeout_s, hurried_timeout_s=HURRIED_TIMEOUT_S)
    gate = GrpcGate(SERVICE, intake, tenants, limiter, gateway.aside, num_contexts=NUM_CONTEXTS, json_names=JSON_NAMES)
    return build_server(
        host=config.host,
        port=config.grpc_port,
        add_servicers=[lambda server: add_InferenceServicer_to_server(service, server)],
        service_names=[SERVICE.full_name],
        max_message_bytes=max_message_bytes,
        max_unread_bytes=UNREAD_BYTES,
        interceptors=(gate,),
    )


@contextlib.asynccontextmanager
async def serving_grpc(server: BoundServer) -> AsyncIterator[None]:
    await server.start()
    try:
        yield
    finally:
        await server.stop(CLOSE_TIMEOUT_S)


@contextlib.asynccontextmanager
async def serving_http(config: GatewayConfig, app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    server = UnsignalledServer(_http_config(config, app))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def _http_config(config: GatewayConfig, app: ASGIApp) -> HttpConfig:
    return HttpConfig(
        app,
        timeouts=Timeouts(keep_alive_s=config.keep_alive_s, head_s=config.head_timeout_s, body_s=config.body_timeout_s),
        connections=Connections(
            idle=Waiting(config.max_idle_connections), half_open=Waiting(config.max_half_open_connections)
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
    )
