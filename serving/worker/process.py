"""A worker as a process: it listens, loads its model, and lives as `deploy.life` says.

The port opens at once, before jax is imported, so that whoever started the worker knows its address and starts what
needs it; health turns SERVING when all is there that a request needs. Programs that make small steps faster are
prepared behind that. A signal while it loads ends it with 0. A fault on the device ends the process with 1, since what
the device then holds is unknown; so does a fault in the engine's own bookkeeping, and of a gang any member's end.
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from moonshard.rpc import link_pb2
from moonshard.rpc.addresses import host_port
from moonshard.rpc.server.server import BoundServer, build_server
from moonshard.serving.config.cluster_key import cluster_key
from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, announced_host_of, port_of, processes_of
from moonshard.serving.config.tls import link_credentials, server_tls
from moonshard.serving.deploy.device_process import begin_device_process
from moonshard.serving.deploy.heap import importing, keep_for_life
from moonshard.serving.deploy.life import FAILED_EXIT_CODE, Life, stop_signals
from moonshard.serving.deploy.startup import STARTUP_EXIT_CODE, ProcessStart, startup_message
from moonshard.serving.deploy.status_pipe import Status
from moonshard.serving.gang.leader import Gang
from moonshard.serving.gang.members import GangFault, Member, end_at_once, made_of, meet, num_drawing
from moonshard.serving.observe.rows.recorder import Recorder, recording
from moonshard.serving.observe.rows.schema import STARTS, STEPS
from moonshard.serving.observe.rows.steps import NO_STEPS, RecordedSteps
from moonshard.serving.observe.spans.export import exporting
from moonshard.serving.store.ports import free_ports
from moonshard.serving.transfer.transports import KvTransports, openness
from moonshard.serving.worker.link_service import SERVICE, LinkServicer
from moonshard.serving.worker.registration.announcer import Credentials
from moonshard.serving.worker.registration.registrar import Registrar, registered

if TYPE_CHECKING:  # what needs jax is imported once the port is open
    from moonshard.serving.engine.loading.model import LoadedModel
    from moonshard.serving.transfer.plane import KvPlane
    from moonshard.serving.worker.loaded import Loaded
    from moonshard.serving.worker.worker import Worker

STOP_GRACE_S = 1.0
MAX_LINK_MESSAGE_BYTES = 16 << 20  # a million tokens of prompt and as many answered, block names; KV writes have 1 MiB

logger = logging.getLogger(__name__)


type Meeting = Callable[[], None]
type OpenPlane = Callable[[LoadedModel], KvPlane]


class _Stopped(Exception):
    """The process was told to end while it was loading."""


async def run_worker(config: Config, role: WorkerRole, *, status: Status, start: ProcessStart) -> int:
    """Serves until told to stop; the exit code.

    Raises:
        PortInUse, CheckpointError, ModelError, MeshError, TransportUnavailable, ConfigError: before it serves.
    """
    begin_device_process()
    with stop_signals() as stop:
        drain_timeout_s = config.gateway.drain_timeout_s
        life = Life(role=role, status=status, start=start, stop=stop, drain_timeout_s=drain_timeout_s)
        return await _run(config, role, life)


async def _run(config: Config, role: WorkerRole, life: Life) -> int:
    key = cluster_key(config, os.environ).proofs
    transports = KvTransports(config, key)
    ready: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
    gang = _gang_of(config, role, life)
    async with _listening(config, role, transports, key, ready, gang) as server:
        address = host_port(config.worker.host, server.port)
        life.status("listening", {"address": address})
        async with (
            exporting(config.telemetry, role=role, instance=address) as export,
            recording(config.trace, STEPS, STARTS) as recorder,  # written before anybody waits for a collector
        ):
            loaded = await _loaded(config, role, lambda model: transports.open_plane(model, server.port), life, gang)
            if loaded is None:
                return 0
            recorded = NO_STEPS if recorder is None else _recorded_steps(recorder, address)
            worker = loaded.worker(config, role, export, recorded)
            keep_for_life()
            worker.start()
            ready.set_result(worker)
            opened = functools.partial(openness, config, role, server.port)
            served = ServedWorker(worker, server, drain_timeout_s=life.drain_timeout_s, openness=opened, gang=gang)
            async with known_to_gateways(config, key, server.port, worker, life.stop):
                return await life.live(served, name=address, recorder=recorder)


@contextlib.asynccontextmanager
async def known_to_gateways(
    config: Config, key: bytes, port: int, worker: "Worker", stop: asyncio.Event
) -> AsyncIterator[None]:
    """The worker is ready, at `port`: the gateways of `worker.gateways` know of it inside the block.

    ConfigError, once `stop` has ended the block, where they reach another process at this one's address.
    """
    address, faults = host_port(announced_host_of(config), port), list[str]()

    def taken(told: str) -> None:
        if not worker.was_reached:  # else it is where it says, and that gateway is led astray
            faults.append(f"worker.host: {told}; give each worker an address of its own")
            stop.set()

    announced = link_pb2.Announcement(address=address, welcome=worker.welcome())
    credentials = Credentials(key=key, tls=link_credentials(config))
    async with registered(Registrar(config.worker.gateways, announced, credentials, taken)):
        yield
    if faults:
        raise ConfigError(faults[:1])


def _gang_of(config: Config, role: WorkerRole, life: Life) -> Gang | None:
    """What this process leads, where the worker is several. Whichever of them is told to end, all do."""
    if (num_members := processes_of(config, role)) == 1:
        return None
    return Gang(
        num_members,
        asyncio.create_task(asyncio.to_thread(made_of, config, role)),
        timeout_s=config.worker.gang_timeout_s,
        num_drawing=num_drawing(config, role),
        on_leaving=life.stop.set,
    )


async def _loaded(
    config: Config, role: WorkerRole, open_plane: OpenPlane, life: Life, gang: Gang | None
) -> "Loaded | None":
    """What serves: of a gang, once all its members are there and have loaded. None if told to stop before."""
    if gang is None:
        return await _load(config, role, open_plane, life, None)
    ending = asyncio.create_task(_end_with(gang, life))
    try:
        meeting = await _gathered(gang, config, life)
        if meeting is None:
            return None
        loaded = await _load(config, role, open_plane, life, meeting)
        if loaded is None:
            await gang.end()
            return None
        await gang.wait_ready(config.worker.gang_join_timeout_s)
        return loaded.led_by(gang)
    except Exception as error:
        _end_start(error, life)
    finally:
        ending.cancel()


async def _end_with(gang: Gang, life: Life) -> None:
    """Until it serves: what loads, on a thread, may wait for a member that is gone."""
    await asyncio.wait({gang.failed})
    _end_start(gang.failed.exception() or AssertionError("a gang that ended"), life)


def _end_start(error: BaseException, life: Life) -> NoReturn:
    """At once: the others end when they hear of it, and what they say then must not come first."""
    if (message := startup_message(error)) is None:
        _end_gang(error)
    life.status("failed", {"message": message, "exit_code": STARTUP_EXIT_CODE})
    end_at_once(STARTUP_EXIT_CODE, message)


def _end_gang(error: BaseException) -> NoReturn:
    """At once: others wait for this process, and collectives that one is missing from are never done."""
    logger.error("%s; the gang ends", error, exc_info=None if isinstance(error, GangFault) else error)
    end_at_once(FAILED_EXIT_CODE)


async def _gathered(gang: Gang, config: Config, life: Life) -> Meeting | None:
    """How all members meet, once all are there; None where it was told to stop before."""
    life.status("progress", {"message": f"waiting for {gang.num_members - 1} other members of the gang"})
    gathering = asyncio.create_task(gang.gather(config.worker.gang_join_timeout_s))
    stopping = asyncio.create_task(life.stop.wait())
    await asyncio.wait({gathering, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not gathering.done():
        gathering.cancel()
        return None
    gathering.result()
    [port] = free_ports(1)
    coordinator = host_port(config.worker.host, port)
    gang.welcome(coordinator)
    member = Member(0, gang.num_members)
    return functools.partial(meet, coordinator, member, config.worker.host, timeout_s=config.worker.gang_join_timeout_s)


@contextlib.asynccontextmanager
async def _listening(
    config: Config,
    role: WorkerRole,
    transports: KvTransports,
    key: bytes,
    ready: "asyncio.Future[Worker]",
    gang: Gang | None,
) -> AsyncIterator[BoundServer]:
    """The port is open within the block; links wait there for `ready`."""
    server = build_server(
        host=config.worker.host,
        port=port_of(config, role),
        add_servicers=[
            LinkServicer(ready).add_to,
            transports.add_to,
            *([] if gang is None else [gang.add_to]),
        ],
        service_names=[SERVICE.full_name],
        tls=server_tls(config),
        key=key,
        max_message_bytes=MAX_LINK_MESSAGE_BYTES,
    )
    await server.start()
    try:
        yield server
    finally:
        ready.cancel()
        await server.stop(STOP_GRACE_S)


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """A worker behind its open port, as `deploy.life` drives it: ready from the first, until its engine fails."""

    worker: "Worker"
    server: BoundServer
    drain_timeout_s: float
    openness: Callable[[], Mapping[str, object]] = dict  # what stands open, told with `ready`
    gang: Gang | None = None

    async def failure(self) -> BaseException:
        watched = [self.worker.engine.failed] if self.gang is None else [self.gang.failed, self.worker.engine.failed]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        error = next(failed for failed in watched if failed.done()).exception()
        return error if error is not None else AssertionError("an engine that ended")

    async def set_serving(self, is_serving: bool) -> None:
        await self.server.set_serving(is_serving)

    async def wait_ready(self) -> None:
        pass

    async def wait_not_ready(self) -> None:
        await asyncio.Event().wait()

    def on_ready(self) -> Mapping[str, object]:
        return self.openness()

    def on_told(self) -> None:
        self.worker.start_behind()

    def begin_drain(self) -> None:
        self.worker.begin_drain()

    async def wait_idle(self) -> None:
        await self.worker.wait_idle()

    async def cut_off(self) -> None:
        """Only warns: `close` ends what still runs."""
        if self.worker.is_flushing:
            logger.warning("blocks still waited to be kept by kv.store after %g s and are not", self.drain_timeout_s)
        else:
            logger.warning("requests were still running after %g s and are cancelled", self.drain_timeout_s)

    async def close(self) -> None:
        closing = asyncio.create_task(self.worker.close())
        if self.gang is not None:
            await asyncio.wait({closing, self.gang.failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.gang.failed.done():  # its device may wait for a member that is gone
                self.fail(await self.failure())
        await closing
        if self.gang is not None:
            await self.gang.end()

    def fail(self, error: BaseException) -> None:
        if self.gang is not None:
            _end_gang(error)
        logger.error("the engine failed", exc_info=error)
        self.worker.fail()


def _recorded_steps(recorder: Recorder, address: str) -> RecordedSteps:
    return RecordedSteps(recorder.rows(STEPS).append, address, lambda: recorder.num_lost)


async def _load(
    config: Config,
    role: WorkerRole,
    open_plane: OpenPlane,
    life: Life,
    meeting: Meeting | None,
) -> "Loaded | None":
    """Loads on a thread, so that signals and health checks are answered meanwhile; None if told to stop.

    `meeting`: how the members of a gang come together, before jax looks for devices.
    """
    loop, start = asyncio.get_running_loop(), life.start

    def progress(message: str) -> None:
        if life.stop.is_set():
            raise _Stopped  # a thread can only be asked to end
        loop.call_soon_threadsafe(life.status, "progress", {"message": message})

    def on_thread() -> "Loaded":
        with start.timings.phase("jax"), importing():
            from moonshard.serving.worker.loaded import load
        if meeting is not None:
            meeting()
        return load(config, role, open_plane, progress, start)

    try:
        return await asyncio.to_thread(on_thread)
    except _Stopped:
        return None
