"""The gateway as a process: both fronts over one pipeline, living as `deploy.life` says.

Ports are bound before anything else, so that a start that cannot succeed fails at once. Signals drain once both fronts
are open: first everyone who asks is told (`/ready`, gRPC health), then running requests finish, then the fronts close.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from moonshard.rpc.addresses import host_port
from moonshard.rpc.server.server import MAX_CONNECTIONS, BoundServer
from moonshard.rpc.status import Unavailable
from moonshard.serving.config.addresses import default_worker_addresses
from moonshard.serving.config.cluster_key import ClusterKey, cluster_key
from moonshard.serving.config.keys import Config, ConfigError, GatewayConfig
from moonshard.serving.config.loopback import is_loopback
from moonshard.serving.config.tenants import Salts, load_tenants
from moonshard.serving.config.tls import link_credentials, server_tls
from moonshard.serving.deploy.children.child import hear
from moonshard.serving.deploy.heap import keep_for_life, unmap_large_blocks_once_freed
from moonshard.serving.deploy.life import Life, stop_signals
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.deploy.status_pipe import Status
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.gateway.aside import SWITCH_INTERVAL_S
from moonshard.serving.gateway.batches.inner import NamedTenants
from moonshard.serving.gateway.batches.serving import opened_batches, running_batches
from moonshard.serving.gateway.fronts import (
    CLOSE_TIMEOUT_S,
    bind_http,
    grpc_front,
    serving_grpc,
    serving_http,
)
from moonshard.serving.gateway.http.connections.open_files import allow_connections
from moonshard.serving.gateway.http.event_stream import KEEP_ALIVE_S
from moonshard.serving.gateway.http.front import HttpFront
from moonshard.serving.gateway.http.strangers import Strangers
from moonshard.serving.gateway.intake.bounds import Bounds, Intake
from moonshard.serving.gateway.openai.unknown import UnknownFields
from moonshard.serving.gateway.pipeline.generation import DRAINING_RETRY_AFTER_S, Gateway
from moonshard.serving.gateway.pipeline.handoffs import Handoffs
from moonshard.serving.gateway.pipeline.model import ServedModel, load_served_model
from moonshard.serving.gateway.pipeline.seeds import Seeds
from moonshard.serving.gateway.records.accounts.ledger import Ledger
from moonshard.serving.gateway.records.accounts.rates import TokenRates
from moonshard.serving.gateway.records.metrics import GatewayMetrics
from moonshard.serving.gateway.records.readers import request_logs
from moonshard.serving.gateway.records.worker_metrics import StepObserver, WorkerCollector
from moonshard.serving.gateway.responses.stored import StoredResponses
from moonshard.serving.gateway.workers.dispatching import dispatcher_of
from moonshard.serving.gateway.workers.knowledge import Knowledge
from moonshard.serving.gateway.workers.pool import LinkPool, PoolEvents
from moonshard.serving.gateway.workers.registry import Registry, registry_server, serving_registry
from moonshard.serving.observe.rows.recorder import Recorder, recording
from moonshard.serving.observe.rows.schema import REQUESTS, STARTS, TOKENS
from moonshard.serving.observe.spans.export import SpanExport, exporting

COMPLETE_WITHIN_S = 1.0  # how long the first worker that decodes waits for one that prefills

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningGateway:
    """A gateway that answers on both fronts."""

    gateway: Gateway
    grpc_server: BoundServer
    http: str  # base URL
    grpc: str  # host:port
    registry: str | None  # host:port; None: workers are listed
    recorder: Recorder | None


@dataclass(frozen=True, slots=True)
class ServedGateway:
    """A gateway as `deploy.life` drives it: ready while its workers can serve. Its process has no failure of its
    own.
    """

    running: RunningGateway
    timings: Timings
    begun_s: float  # by the timings' clock: since when it waits for workers

    async def failure(self) -> BaseException:
        return await asyncio.get_running_loop().create_future()

    async def set_serving(self, is_serving: bool) -> None:
        await self.running.grpc_server.set_serving(is_serving)

    async def wait_ready(self) -> None:
        """With a worker that decodes; one that prefills and is about to come is waited for, so that it gets prompts."""
        pool = self.running.gateway.pool
        await pool.wait_ready()
        while not await pool.wait_complete(COMPLETE_WITHIN_S):
            await pool.wait_ready()  # who decoded has gone meanwhile

    async def wait_not_ready(self) -> None:
        await self.running.gateway.pool.wait_not_ready()

    def on_ready(self) -> Mapping[str, object]:
        self.timings.note("workers", self.begun_s)
        return {}

    def on_told(self) -> None:
        pass

    def begin_drain(self) -> None:
        self.running.gateway.is_draining = True

    async def wait_idle(self) -> None:
        await self.running.gateway.wait_idle()

    async def cut_off(self) -> None:
        """Ends what still runs with Unavailable."""
        gateway = self.running.gateway
        gateway.pool.fail_all(Unavailable("the server is shutting down", retry_after_s=DRAINING_RETRY_AFTER_S))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gateway.wait_idle(), CLOSE_TIMEOUT_S)

    async def close(self) -> None:
        """Its fronts close with the block that opened them."""

    def fail(self, error: BaseException) -> None:
        raise error


async def run_gateway(config: Config, *, status: Status, start: ProcessStart, orders_fd: int | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. PortInUse, OSError or the model folder's errors if it cannot.

    Through `orders_fd` a supervisor tells where workers are that came back elsewhere.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    unmap_large_blocks_once_freed()
    allow_connections(config.gateway.max_idle_connections + config.gateway.max_half_open_connections + MAX_CONNECTIONS)
    opening_s = start.timings.now_s
    async with serving(config) as running, following_orders(config.gateway, orders_fd, running.gateway.pool):
        start.timings.note("fronts", opening_s)
        with stop_signals() as stop:
            keep_for_life()
            registry = {} if running.registry is None else {"registry": running.registry}
            status("listening", {"http": running.http, "grpc": running.grpc, **registry})
            drain_timeout_s = config.gateway.drain_timeout_s
            life = Life(role="gateway", status=status, start=start, stop=stop, drain_timeout_s=drain_timeout_s)
            served = ServedGateway(running, start.timings, start.timings.now_s)
            return await life.live(served, name=running.http, recorder=running.recorder)


@contextlib.asynccontextmanager
async def following_orders(config: GatewayConfig, orders_fd: int | None, pool: LinkPool) -> AsyncIterator[None]:
    """Within the block the pool follows the workers to where the supervisor says that they are.

    Of workers that register nobody else need say it, and there may be some that the supervisor does not know.
    """

    def on_order(event: str, fields: dict[str, object]) -> None:
        if config.registry == "list" and event == "workers" and isinstance(addresses := fields.get("addresses"), list):
            pool.move([str(address) for address in addresses])

    if orders_fd is None:
        yield
        return
    hearing = asyncio.create_task(hear(orders_fd, on_event=on_order, on_line=logger.warning))
    try:
        yield
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


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
    """The gateway within what is open already: the HTTP port, and ledger, recorder and export of spans where there are
    any.
    """
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
        seeds=Seeds(key.seeds),
        max_queued_requests=config.gateway.max_queued_requests,
        max_attempts=config.routing.max_attempts,
    )
    intake = _intake(config.gateway, gateway)
    front_of = partial(
        HttpFront,
        gateway,
        metrics,
        version=version("moonshard"),
        intake=intake,
        unknown_fields=UnknownFields(config.gateway.unknown_fields, metrics),
        strangers=_strangers(config.gateway, listener),
        stored=StoredResponses(config.responses.max_stored, config.responses.max_stored_bytes),
        keep_alive_s=keep_alive_s,
    )
    batches = opened_batches(
        config.batches,
        gateway,
        metrics,
        lambda: front_of(tenants=NamedTenants(), is_background=True).app,
        config.gateway.max_body_bytes,
    )
    front = front_of(tenants=tenants, batches=batches)
    grpc_server = grpc_front(config.gateway, gateway, intake, tenants)
    async with (
        pool.running(),
        _registry(config, key, pool) as registry,
        running_batches(batches),
        serving_grpc(grpc_server),
        serving_http(config.gateway, front.app, listener),
    ):
        yield RunningGateway(
            gateway=gateway,
            grpc_server=grpc_server,
            http=f"http://{_http_address(config, listener)}",
            grpc=host_port(config.gateway.host, grpc_server.port),
            registry=registry,
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


def _http_address(config: Config, listener: socket.socket) -> str:
    return host_port(config.gateway.host, listener.getsockname()[1])


def worker_addresses(config: Config) -> tuple[str, ...]:
    """Where workers are looked for from the first."""
    if config.gateway.registry == "grpc":
        return ()
    return config.gateway.workers or default_worker_addresses(config)


@contextlib.asynccontextmanager
async def _registry(config: Config, key: ClusterKey, pool: LinkPool) -> AsyncIterator[str | None]:
    """Where workers may register inside the block; None where they are listed."""
    gateway = config.gateway
    if gateway.registry == "list":
        yield None
        return
    registry = Registry(pool, lease_s=gateway.worker_silence_s)
    server = registry_server(
        registry, host=gateway.registry_host, port=gateway.registry_port, key=key.proofs, tls=server_tls(config)
    )
    async with serving_registry(registry, server):
        yield host_port(gateway.registry_host, server.port)


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


def _link_pool(
    config: Config, key: ClusterKey, metrics: GatewayMetrics, knowledge: Knowledge, handoffs: Handoffs
) -> LinkPool:
    observer = StepObserver(metrics)
    pool = LinkPool(
        worker_addresses(config),
        knowledge,
        PoolEvents(on_load=observer, on_handoff=handoffs.receive, on_lost=handoffs.lost, on_removed=observer.removed),
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


def _strangers(config: GatewayConfig, listener: socket.socket) -> Strangers:
    return Strangers(
        allowed_origins=frozenset(config.allowed_origins),
        allowed_hosts=frozenset(config.allowed_hosts),
        is_guarded=config.keys is None and is_loopback(config.host),
        port=listener.getsockname()[1],
    )
