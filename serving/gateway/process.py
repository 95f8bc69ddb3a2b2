"""The gateway process: both fronts over one pipeline, from the first bind to the end of the drain.

Ports are bound before anything else, so that a start that cannot succeed fails at once. SIGTERM and SIGINT drain: first
everyone who asks is told (`/ready`, gRPC health), then running requests finish, then the fronts close.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from moonshard.rpc.inference_pb2_grpc import add_InferenceServicer_to_server
from moonshard.rpc.receive_limiter import ReceiveLimiter
from moonshard.rpc.server import MAX_CONNECTIONS, BoundServer, PortInUse, build_server
from moonshard.rpc.status import Unavailable
from moonshard.serving.config.cluster_key import ClusterKey, cluster_key
from moonshard.serving.config.keys import Config, ConfigError, GatewayConfig, default_worker_addresses
from moonshard.serving.config.loopback import is_loopback
from moonshard.serving.config.tenants import Salts, Tenants, load_tenants
from moonshard.serving.config.tls import link_credentials
from moonshard.serving.deploy.heap import keep_for_life, unmap_large_blocks_once_freed
from moonshard.serving.deploy.startup import Start, tell_start
from moonshard.serving.deploy.status_pipe import Status
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.gateway.aside import SWITCH_INTERVAL_S
from moonshard.serving.gateway.grpc.front import JSON_NAMES, NUM_CONTEXTS, SERVICE, InferenceService
from moonshard.serving.gateway.grpc.gate import GrpcGate
from moonshard.serving.gateway.http.connections.open_files import allow_connections
from moonshard.serving.gateway.http.connections.protocol import HttpConfig, Timeouts
from moonshard.serving.gateway.http.connections.waiting import Connections, Waiting
from moonshard.serving.gateway.http.event_stream import KEEP_ALIVE_S
from moonshard.serving.gateway.http.front import HttpFront
from moonshard.serving.gateway.http.strangers import Strangers
from moonshard.serving.gateway.intake.bounds import Bounds, Intake
from moonshard.serving.gateway.openai.unknown import UnknownFields
from moonshard.serving.gateway.pipeline.generation import DRAINING_RETRY_AFTER_S, Gateway
from moonshard.serving.gateway.pipeline.handoffs import Handoffs
from moonshard.serving.gateway.pipeline.model import ServedModel, load_served_model
from moonshard.serving.gateway.records.ledger import Ledger
from moonshard.serving.gateway.records.metrics import GatewayMetrics
from moonshard.serving.gateway.records.rates import TokenRates
from moonshard.serving.gateway.records.readers import request_logs
from moonshard.serving.gateway.records.worker_metrics import StepObserver, WorkerCollector
from moonshard.serving.gateway.workers.dispatching import dispatcher_of
from moonshard.serving.gateway.workers.knowledge import Knowledge
from moonshard.serving.gateway.workers.pool import LinkPool, PoolEvents
from moonshard.serving.observe.rows.recorder import Recorder, recording
from moonshard.serving.observe.rows.schema import REQUESTS, STARTS, TOKENS
from moonshard.serving.observe.spans.export import SpanExport, exporting

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningGateway:
    """A gateway that answers on both fronts."""

    gateway: Gateway
    grpc_server: BoundServer
    http: str  # base URL
    grpc: str  # host:port
    recorder: Recorder | None


async def run_gateway(config: Config, *, status: Status, start: Start) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. PortInUse, OSError or the model folder's errors if it cannot."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    unmap_large_blocks_once_freed()
    allow_connections(config.gateway.max_idle_connections + config.gateway.max_half_open_connections + MAX_CONNECTIONS)
    stopped, opening_s = asyncio.Event(), start.timings.now_s
    async with serving(config) as running:
        start.timings.note("fronts", opening_s)
        with _set_on_signal(stopped):
            keep_for_life()
            status("listening", {"http": running.http, "grpc": running.grpc})
            health = asyncio.create_task(_follow_readiness(running, status, start.timings))
            await stopped.wait()
            health.cancel()
            await asyncio.gather(health, return_exceptions=True)
            status("draining", {})
            await drain(running, config.gateway.drain_timeout_s)
    return 0


@contextlib.asynccontextmanager
async def serving(config: Config, *, keep_alive_s: float = KEEP_ALIVE_S) -> AsyncIterator[RunningGateway]:
    """Both fronts and the links to the workers, up inside the block."""
    with contextlib.closing(bind_http(config.gateway.host, config.gateway.port)) as listener:
        async with (
            _ledger_at(config.gateway.ledger) as ledger,
            exporting(config.telemetry, role="gateway", instance=_http_address(config, listener)) as export,
            recording(config.trace, REQUESTS, TOKENS, STARTS) as recorder,
            _serving(config, listener, ledger, recorder, export, keep_alive_s) as running,
        ):
            yield running


@contextlib.asynccontextmanager
async def _serving(
    config: Config,
    listener: socket.socket,
    ledger: Ledger | None,
    recorder: Recorder | None,
    export: SpanExport | None,
    keep_alive_s: float,
) -> AsyncIterator[RunningGateway]:
    """With what is open already: the HTTP port, and ledger, recorder and export of spans where there are any."""
    model = load_served_model(config.model.path, config.model.name)
    _warn_of_open_access_or_no_tokenizer(config, model)
    tenants = load_tenants(config.gateway.keys)
    key = cluster_key(config, os.environ)
    metrics = GatewayMetrics(model.name)
    knowledge = Knowledge(dispatcher_of(worker_addresses(config), config.routing))
    handoffs = Handoffs(knowledge, lease_s=config.kv.lease_s)
    pool = _link_pool(config, key, metrics, knowledge, handoffs)
    num_tokens = config.gateway.tenant_tokens_per_minute
    rates = None if num_tokens is None else TokenRates(num_tokens)
    gateway = Gateway(
        model,
        pool,
        handoffs,
        request_logs(config, metrics, ledger=ledger, rates=rates, recorder=recorder, export=export),
        rates,
        salts=Salts(key.salts),
        max_queued_requests=config.gateway.max_queued_requests,
        max_attempts=config.routing.max_attempts,
    )
    intake = _intake(config.gateway, gateway)
    front = HttpFront(
        gateway,
        metrics,
        version=version("moonshard"),
        intake=intake,
        unknown_fields=UnknownFields(config.gateway.unknown_fields, metrics),
        tenants=tenants,
        strangers=_strangers(config.gateway, listener),
        keep_alive_s=keep_alive_s,
    )
    grpc_server = _grpc_server(config.gateway, gateway, intake, tenants)
    async with pool.running(), _serving_grpc(grpc_server), _serving_http(config.gateway, front.app, listener):
        yield RunningGateway(
            gateway=gateway,
            grpc_server=grpc_server,
            http=f"http://{_http_address(config, listener)}",
            grpc=f"{_host(config)}:{grpc_server.port}",
            recorder=recorder,
        )


def _warn_of_open_access_or_no_tokenizer(config: Config, model: ServedModel) -> None:
    if config.gateway.keys is None and not is_loopback(config.gateway.host):
        logger.warning(
            "gateway.host = %s without gateway.keys: whoever reaches it is served, and reads its metrics",
            config.gateway.host,
        )
    if model.tokenizer is None:
        logger.warning("%s has no tokenizer: prompts are token ids, and so are answers", config.model.path)


def _host(config: Config) -> str:
    return f"[{config.gateway.host}]" if ":" in config.gateway.host else config.gateway.host


def _http_address(config: Config, listener: socket.socket) -> str:
    return f"{_host(config)}:{listener.getsockname()[1]}"


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
    """Of the connections that it accepts."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_PROBES.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def worker_addresses(config: Config) -> tuple[str, ...]:
    return config.gateway.workers or default_worker_addresses(config)


async def drain(running: RunningGateway, timeout_s: float) -> None:
    """No new requests; the running ones finish, or end with Unavailable when the time is over."""
    gateway = running.gateway
    gateway.is_draining = True
    await running.grpc_server.set_serving(False)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(gateway.wait_idle(), timeout_s)
        return
    gateway.pool.fail_all(Unavailable("the server is shutting down", retry_after_s=DRAINING_RETRY_AFTER_S))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(gateway.wait_idle(), CLOSE_TIMEOUT_S)


async def _follow_readiness(running: RunningGateway, status: Status, timings: Timings) -> None:
    """gRPC health says what `/ready` says; `ready` is reported the first time."""
    pool, waiting_s = running.gateway.pool, timings.now_s
    await pool.wait_ready()
    timings.note("workers", waiting_s)
    await running.grpc_server.set_serving(True)
    tell_start(timings, status, running.recorder, process=running.http, role="gateway")
    status("ready", {})
    while True:
        await pool.wait_not_ready()
        await running.grpc_server.set_serving(False)
        await pool.wait_ready()
        await running.grpc_server.set_serving(True)


@contextlib.contextmanager
def _set_on_signal(event: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, event.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _intake(config: GatewayConfig, gateway: Gateway) -> Intake:
    tokenizer = gateway.model.tokenizer

    def bounds() -> Bounds:
        limits = gateway.pool.limits
        return Bounds(
            max_body_bytes=config.max_body_bytes,
            max_context_tokens=None if limits is None else limits.max_context_tokens,
            max_token_bytes=None if tokenizer is None else tokenizer.max_token_bytes,
        )

    return Intake(config.max_bytes_in_flight, bounds)


def _grpc_server(config: GatewayConfig, gateway: Gateway, intake: Intake, tenants: Tenants) -> BoundServer:
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


def _link_pool(
    config: Config, key: ClusterKey, metrics: GatewayMetrics, knowledge: Knowledge, handoffs: Handoffs
) -> LinkPool:
    pool = LinkPool(
        worker_addresses(config),
        knowledge,
        PoolEvents(on_load=StepObserver(metrics), on_handoff=handoffs.receive, on_lost=handoffs.lost),
        silence_s=config.gateway.worker_silence_s,
        key=key.proofs,
        credentials=link_credentials(config),
    )
    metrics.registry.register(WorkerCollector(pool, metrics.model_name))
    return pool


@contextlib.asynccontextmanager
async def _ledger_at(path: Path | None) -> AsyncIterator[Ledger | None]:
    """Written to during the block. ConfigError, or LedgerError, where it cannot be."""
    if path is None:
        yield None
        return
    try:
        ledger = Ledger(path)
    except OSError as error:
        raise ConfigError([f"gateway.ledger: {path}: {error.strerror}"]) from error
    ledger.start()
    try:
        yield ledger
    finally:
        await asyncio.to_thread(ledger.close)


@contextlib.asynccontextmanager
async def _serving_grpc(server: BoundServer) -> AsyncIterator[None]:
    await server.start()
    try:
        yield
    finally:
        await server.stop(CLOSE_TIMEOUT_S)


@contextlib.asynccontextmanager
async def _serving_http(config: GatewayConfig, app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
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


def _strangers(config: GatewayConfig, listener: socket.socket) -> Strangers:
    return Strangers(
        allowed_origins=frozenset(config.allowed_origins),
        allowed_hosts=frozenset(config.allowed_hosts),
        is_guarded=config.keys is None and is_loopback(config.host),
        port=listener.getsockname()[1],
    )
