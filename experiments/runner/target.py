"""The server that a trial measures: started for it, or one that runs already; and how to hear that it died.

A started one has a fresh cache, records into the trial's folder, and is not restarted when a process of it dies.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.running.deployment import Process, deployed
from moonshard.experiments.common.running.server import RunningServer
from moonshard.experiments.runner.points import Point
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import RequestError
from moonshard.serving.config.keys import Config

SERVER = "server"  # the folder, in that of a trial, which a started one records into
HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 1.0  # a process that is killed closes its connections, and has ended a moment later
MAX_UNHEALTHY = 3  # answers in a row after which a server that runs already counts as gone
_ADDRESS = re.compile(r"(grpc://)?(?P<address>[^/\s]+:\d+)/?")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTarget:
    grpc: str  # host:port
    started: RunningServer | None = None  # None: it ran already
    processes: Mapping[str, Process] | None = None

    def cpu_s(self) -> dict[str, float]:
        """Processor time of each process since its start; nothing of one that has ended, or that ran already."""
        found = {}
        for role in self.started.pids if self.started else ():
            with contextlib.suppress(OSError, IndexError):
                found[role] = self.started.cpu_s(role) if self.started else 0.0
        return found

    def ended_badly(self) -> list[str]:
        """After the end: the processes that had to be killed, or that ended with an error."""
        codes = {name: process.running.poll() for name, process in (self.processes or {}).items()}
        return [_how(name, code) for name, code in codes.items() if code]


def grpc_address(url: str) -> str:
    """The address in a URL. ExperimentError for what is not the address of a gRPC service."""
    found = _ADDRESS.fullmatch(url)
    if found is None:
        raise ExperimentError(
            f"--url {url}: requests are sent over gRPC; give the gateway's gRPC address, host:port, as its ready line "
            "says it"
        )
    return found["address"]


@contextmanager
def target_of(point: Point, url: str | None, folder: Path, environment: Mapping[str, str]) -> Iterator[RunTarget]:
    """The server, ready during the block. ServerFailed if it cannot start."""
    if point.server is None:
        if url is None:
            raise ExperimentError("neither a server to start nor one that runs")
        yield RunTarget(grpc=grpc_address(url))
        return
    config = replace(point.server, trace=replace(point.server.trace, path=(folder / SERVER).absolute()))
    logs = folder / "logs"
    logs.mkdir()
    with (
        _fresh_files(config) as config,
        deployed(config, environment, cores=point.cores or None, logs=logs) as deployment,
    ):
        yield RunTarget(grpc=deployment.server.grpc, started=deployment.server, processes=deployment.processes)


@contextmanager
def _fresh_files(config: Config) -> Iterator[Config]:
    """The same, with files for KV blocks in a folder of their own, under the one that it names, which is then gone."""
    store = config.kv.store
    if store.ssd_path is None:
        yield config
        return
    store.ssd_path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="trial-", dir=store.ssd_path) as own:
        yield replace(config, kv=replace(config.kv, store=replace(store, ssd_path=Path(own).absolute())))


async def death(target: RunTarget, client: AsyncClient) -> str:
    """Returns when the server has died, with what is known of it."""
    if target.processes is not None:
        return await _first_exit(target.processes)
    num_unhealthy = 0
    while num_unhealthy < MAX_UNHEALTHY:
        await asyncio.sleep(HEALTH_INTERVAL_S)  # another machine's server tells nobody that it died
        num_unhealthy = 0 if await _is_healthy(client) else num_unhealthy + 1
    return f"the server at {target.grpc} is not there any more"


async def last_look(target: RunTarget, client: AsyncClient) -> str | None:
    """What is known of the server's death when requests have failed: their errors may arrive just before it."""
    if target.processes is None:
        return None if await _is_healthy(client) else f"the server at {target.grpc} is not there any more"
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            return await _first_exit(target.processes)
    except TimeoutError:
        return None


async def _is_healthy(client: AsyncClient) -> bool:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            return await client.health()
    except (RequestError, TimeoutError):
        return False


async def _first_exit(processes: Mapping[str, Process]) -> str:
    loop = asyncio.get_running_loop()
    first: asyncio.Future[str] = loop.create_future()
    descriptors = {name: os.pidfd_open(process.running.pid) for name, process in processes.items()}
    try:
        for name, descriptor in descriptors.items():
            loop.add_reader(descriptor, _tell, first, name)
        name = await first
    finally:
        for descriptor in descriptors.values():
            loop.remove_reader(descriptor)
            os.close(descriptor)
    return f"{name} ended with code {processes[name].running.wait()}"


def _how(name: str, code: int) -> str:
    return f"{name} had to be killed at the end" if code == -signal.SIGKILL else f"{name} ended with code {code}"


def _tell(first: asyncio.Future[str], name: str) -> None:
    if not first.done():
        first.set_result(name)
