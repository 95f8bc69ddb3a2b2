"""The life of a worker process: listen, load, serve, drain.

The port opens at once, so that whoever started the worker knows its address; health turns SERVING when all is there
that a request needs. Programs that make small steps faster are prepared behind that. SIGTERM and SIGINT drain: no new
requests, running ones finish, exit with 0. A fault on the device ends the process with 1, since what the device then
holds is unknown; so does a fault in the engine's own bookkeeping.
"""

import asyncio
import logging
import os
import signal
import sys

from moonshard.kv.listening import listening_ports
from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.server import BoundServer, build_server
from moonshard.serving.config.cluster_key import cluster_key
from moonshard.serving.config.keys import Config, WorkerRole, port_of
from moonshard.serving.config.tls import server_tls
from moonshard.serving.deploy.heap import keep_for_life
from moonshard.serving.deploy.startup import Start, tell_start
from moonshard.serving.deploy.status_pipe import Status
from moonshard.serving.engine.compiled.compilations import CompilationCounter
from moonshard.serving.engine.compiled.store import ProgramStore
from moonshard.serving.engine.loading import LoadedModel, load_model
from moonshard.serving.observe.rows.recorder import Recorder, recording
from moonshard.serving.observe.rows.schema import STARTS, STEPS
from moonshard.serving.observe.rows.steps import NO_STEPS, RecordedSteps
from moonshard.serving.observe.spans.export import exporting
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.transfer.transports import KvTransports
from moonshard.serving.worker.link_service import LinkServicer
from moonshard.serving.worker.spans import WorkerSpans
from moonshard.serving.worker.worker import Worker

SERVICE_NAME = link_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
STOP_GRACE_S = 1.0
MAX_LINK_MESSAGE_BYTES = 16 << 20  # a million tokens of prompt and as many answered, block names; KV writes have 1 MiB
# The device threads hold Python's lock for microseconds, the event loop for milliseconds: at the default of 5 ms a step
# that is done waits for the loop. Side by side on two cores, 8 streams gave 1.4 to 1.6 times the tokens per second.
SWITCH_INTERVAL_S = 0.0002

logger = logging.getLogger(__name__)


class _Stopped(Exception):
    """The process was told to end while it was loading."""


async def run_worker(config: Config, role: WorkerRole, *, status: Status, start: Start) -> int:
    """Serves until told to stop; the exit code.

    Raises:
        PortInUse, CheckpointError, ModelError, MeshError, TransportUnavailable, ConfigError: before it serves.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stop = _stop_on_signals()
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Worker] = loop.create_future()
    key = cluster_key(config, os.environ).proofs
    transports = KvTransports(config, key)
    server = build_server(
        host=config.worker.host,
        port=port_of(config, role),
        add_servicers=[
            lambda server: link_pb2_grpc.add_WorkerServicer_to_server(LinkServicer(ready), server),
            transports.add_to,
        ],
        service_names=[SERVICE_NAME],
        tls=server_tls(config),
        key=key,
        max_message_bytes=MAX_LINK_MESSAGE_BYTES,
    )
    await server.start()
    address = _address(config.worker.host, server.port)
    status("listening", {"address": address})
    try:
        async with (
            exporting(config.telemetry, role=role, instance=address) as export,
            recording(config.trace, STEPS, STARTS) as recorder,  # written before anybody waits for a collector
        ):
            spans = WorkerSpans(export, role=role)
            recorded = NO_STEPS if recorder is None else _recorded_steps(recorder, address)
            worker = await _load(config, role, transports, server.port, recorded, spans, status, stop, start)
            if worker is None:
                return 0
            keep_for_life()
            worker.start()
            ready.set_result(worker)
            await server.set_serving(True)
            tell_start(start.timings, status, recorder, process=address, role=role)
            status("ready", _openness(config, role, server.port))
            worker.start_behind()
            return await _serve(worker, server, stop, status, config.gateway.drain_timeout_s)
    finally:
        ready.cancel()
        await server.stop(STOP_GRACE_S)


def _openness(config: Config, role: WorkerRole, port: int) -> dict[str, object]:
    """What stands open beside the worker's own port, where the key is asked for: in words, for whoever reads it."""
    if role == "both" or config.kv.transport != "mooncake":
        return {}
    ports = ", ".join(map(str, sorted(listening_ports() - {port})))
    return {"message": f"ready; open to whoever reaches them are Mooncake's ports: {ports}"} if ports else {}


def _recorded_steps(recorder: Recorder, address: str) -> RecordedSteps:
    return RecordedSteps(recorder.rows(STEPS).append, address, lambda: recorder.num_lost)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _load(
    config: Config,
    role: WorkerRole,
    transports: KvTransports,
    port: int,
    recorded: RecordedSteps,
    spans: WorkerSpans,
    status: Status,
    stop: asyncio.Event,
    start: Start,
) -> Worker | None:
    """Loads on a thread, so that signals and health checks are answered meanwhile; None if told to stop."""
    loop = asyncio.get_running_loop()
    compilations = CompilationCounter()
    compilations.start()

    def progress(message: str) -> None:
        if stop.is_set():
            raise _Stopped  # a thread can only be asked to end
        loop.call_soon_threadsafe(status, "progress", {"message": message})

    def load() -> tuple[LoadedModel, KvPlane | None]:
        store = None if start.programs is None else ProgramStore(start.programs)
        prepares = config.worker.prepare
        model = load_model(config, role, progress, timings=start.timings, store=store, prepares=prepares)
        with start.timings.phase("kv plane"):
            return model, None if role == "both" else transports.open_plane(model, port)

    try:
        model, plane = await asyncio.to_thread(load)
    except _Stopped:
        return None
    worker = Worker(config, role, model, compilations, plane, spans=spans, recorded=recorded)
    compilations.mark_serving()
    return worker


async def _serve(
    worker: Worker, server: BoundServer, stop: asyncio.Event, status: Status, drain_timeout_s: float
) -> int:
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({stopping, worker.engine.failed}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not worker.engine.failed.done():
        status("draining", {})
        await server.set_serving(False)
        worker.begin_drain()
        await _drain(worker, drain_timeout_s)
    if worker.engine.failed.done():
        logger.error("the engine failed", exc_info=worker.engine.failed.exception())
        worker.fail()
        return 1
    await worker.close()
    return 0


async def _drain(worker: Worker, timeout_s: float) -> None:
    """Until nothing runs any more, the engine fails, or the time is over."""
    idle = asyncio.create_task(worker.wait_idle())
    done, _ = await asyncio.wait({idle, worker.engine.failed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    if not done:
        logger.warning("requests were still running after %g s and are cancelled", timeout_s)
