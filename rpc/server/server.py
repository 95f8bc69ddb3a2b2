"""A gRPC server with what every one of ours has: health, reflection, TLS, keepalive, a word on what cannot be read.

Which services it carries is the caller's. Health is NOT_SERVING until the caller says otherwise, since a port is open
long before a model is ready. Signals, and what a drain waits for, are the process's.
"""

import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from moonshard.rpc.addresses import host_port
from moonshard.rpc.server.door import Door
from moonshard.rpc.server.open_services import OpenServices
from moonshard.rpc.tls import TlsFiles, server_credentials

REFLECTION = "grpc.reflection.v1.ServerReflection"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_METADATA_BYTES = 64 * 1024  # of a call; by default a growing share of those over 8 KiB is refused at random
MAX_STREAMS = 1024  # calls at once on one connection; its client lets others wait
MAX_IDLE_MS = 300_000  # a connection without a call; its client makes a new one
MAX_CONNECTIONS = 2048

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers share one port in silence
    ("grpc.keepalive_time_ms", 30_000),  # a client that vanished without a word holds slots: notice it
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # clients of silent streams may ping; by default 5 min
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
)

SetHealth = Callable[[str, health_pb2.HealthCheckResponse.ServingStatus], Awaitable[None]]


class PortInUse(OSError):
    """A start-up error: another process listens there."""

    def __init__(self, host: str, port: int):
        super().__init__(errno.EADDRINUSE, "port in use")
        self.host = host
        self.port = port

    def __str__(self) -> str:
        return f"{self.host}:{self.port} is in use by another process"


class BoundServer:
    """A server whose port is its own already; it answers after `start`."""

    def __init__(self, server: grpc.aio.Server, port: int, set_health: SetHealth, services: Sequence[str]):
        self.server = server
        self.port = port
        self._set_health = set_health
        self._services = ("", *services)  # the empty name stands for the server as a whole

    async def start(self) -> None:
        await self.set_serving(False)
        await self.server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Sets the health of all services at once; watchers are told."""
        answer = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._set_health(service, answer.SERVING if is_serving else answer.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING first, then no new calls. What still runs after the grace is cancelled, health watches too."""
        await self.set_serving(False)
        await self.server.stop(grace_s)


def build_server(
    *,
    host: str,
    port: int,
    add_servicers: Sequence[Callable[[grpc.aio.Server], None]],
    service_names: Sequence[str],
    tls: TlsFiles | None = None,
    key: bytes | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_unread_bytes: int | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> BoundServer:
    """Binds the port (0: a free one) and adds the services, from within a running event loop.

    `service_names` are the full names, as health and reflection spell them. With `key`, only callers who prove that
    they hold it reach the services that were added (`rpc.server.door`). `interceptors` stand before the methods.
    `max_unread_bytes`: how much of a message may come before anybody asks for it. Raises PortInUse, OSError for a host
    or a TLS file that is not there, ValueError for TLS files that gRPC refuses.
    """
    limits = [("grpc.max_receive_message_length", max_message_bytes), ("grpc.max_send_message_length", -1)]
    if max_unread_bytes is not None:  # gRPC would let a stream send ahead up to 4 MiB, by what the network takes
        limits += [("grpc.http2.lookahead_bytes", max_unread_bytes), ("grpc.http2.bdp_probe", 0)]
    doors = () if key is None else (Door(key, lambda: bound_port, has_tls=tls is not None),)
    server = grpc.aio.server(options=[*_OPTIONS, *limits], interceptors=(OpenServices(), *doors, *interceptors))
    for add in add_servicers:
        add(server)
    health_servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # typeshed leaves it out
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    _add_reflection(server, [*service_names, health.SERVICE_NAME])
    bound_port = _bind(server, host, port, tls)
    return BoundServer(server, bound_port, health_servicer.set, service_names)


def _bind(server: grpc.aio.Server, host: str, port: int, tls: TlsFiles | None) -> int:
    address = host_port(host, port)
    credentials = None if tls is None else server_credentials(tls)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        _check_bindable(host, port)
        raise ValueError(f"gRPC cannot listen on {address}: {error}; are the TLS files a matching PEM pair?") from error


def _check_bindable(host: str, port: int) -> None:
    """gRPC says only that a bind failed; the socket says why. Raises PortInUse or another OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with closing(socket.create_server((host, port), family=family)):
            return
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port) from None
        raise


def _add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Under both names: v1, and v1alpha, which older tools ask for. Their messages are the same on the wire.

    v1 is not in its own list: the library has no descriptor of it, and a tool that describes all it finds would fail.
    """
    names = [*services, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION, {"ServerReflectionInfo": handler}),)
    )
