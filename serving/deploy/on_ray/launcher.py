"""Starts workers' processes on the nodes of a Ray cluster, as `role.Launch` does it here.

This process does not know Ray: it tells a driver (`driver`), its child, what to start. Where that ends, by itself or
with its cluster, all that it has started ends too; it is started anew with the next process, as often as one is wanted.
"""

import asyncio
import contextlib
import importlib.util
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.deploy.children.child import Child, OnEvent, OnLine, start_child
from moonshard.serving.deploy.children.role import Process
from moonshard.serving.deploy.children.tether import tethered
from moonshard.serving.deploy.on_ray.orders import Start
from moonshard.serving.deploy.on_ray.placement import Resources, WorkerNeeds, lacking
from moonshard.serving.deploy.startup import STARTUP_EXIT_CODE
from moonshard.serving.deploy.status_pipe import describe

CONNECT_S = 30.0  # for a Ray that is there
START_RAY_S = 120.0  # for one that is started here, on a busy machine
CLOSE_S = 10.0  # for Ray to end what it has started, and itself
DRIVER = (sys.executable, "-m", "moonshard.serving.deploy.on_ray.driver")
LOST_EXIT_CODE = 1
LOST = "Ray's driver ended, and with it all that it had started"
CARRIED = ("JAX_", "XLA_", "NCCL_", "OTEL_", "MC_")  # of this process's environment; a node has its own paths
NOT_CARRIED = ("JAX_COMPILATION_CACHE_DIR",)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPlan:
    """What is to be placed, and where Ray is; `address` None: one is started here."""

    address: str | None
    workers: Sequence[WorkerNeeds]
    environment: Mapping[str, str]
    key: str = field(repr=False)  # the cluster's

    def start_of(self, number: int, name: str, argv: Sequence[str]) -> Start:
        """Of the process that the supervisor knows as `worker 0`, or of its gang's member as `worker 0.1`."""
        gang, _, member = name.partition(".")
        [needs] = [worker for worker in self.workers if worker.name == gang]
        return Start(
            number=number,
            name=name,
            gang=gang,
            member=int(member or 0),
            num_members=needs.num_processes,
            bundle=dict(needs.bundle),
            argv=argv[1:],  # a node has a Python of its own
            environment=dict(self.environment),
            key=self.key,
        )


class RayProcess:
    """A process on some node, as the launcher knows it: with the driver that was told of it."""

    def __init__(self, number: int, driver: Child, on_event: OnEvent, on_line: OnLine) -> None:
        self.on_event = on_event
        self.on_line = on_line
        self._number = number
        self._driver = driver
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def signal(self, number: int) -> None:
        if not self._code.done():
            self._driver.tell("signal", {"number": self._number, "signal": number})

    def end(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)


class RayLauncher:
    """`launch` is what the supervisor calls; `on_line` is told what Ray says. Made by `ray_launcher`."""

    def __init__(self, plan: RayPlan, folder: Path, on_line: OnLine, driver: Sequence[str] = DRIVER) -> None:
        self._plan = plan
        self._argv = (*driver, *(["--address", plan.address] if plan.address else []), "--folder", str(folder))
        self._on_line = on_line
        self._driver: Child | None = None
        self._life: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._processes: dict[int, RayProcess] = {}
        self._num_started = 0
        self._failure, self._exit_code = LOST, LOST_EXIT_CODE
        self._nodes: Sequence[Resources] = ()
        self._connected = asyncio.Event()  # the present driver is

    async def connect(self) -> Sequence[Resources]:
        """The resources of each node. ConfigError where there is no Ray, within a time."""
        await self._driver_now()
        assert self._life is not None
        await _first(self._connected.wait(), self._life)
        if self._connected.is_set():
            return self._nodes
        raise ConfigError([self._failure])

    async def launch(self, name: str, argv: Sequence[str], *, on_event: OnEvent, on_line: OnLine) -> Process:
        driver = await self._driver_now()
        self._num_started += 1
        start = self._plan.start_of(self._num_started, name, argv)
        process = self._processes[start.number] = RayProcess(start.number, driver, on_event, on_line)
        driver.tell("start", asdict(start))
        return process

    async def close(self) -> None:
        """Ends the driver, and with it all that it has started."""
        driver, life = self._driver, self._life
        if driver is None or life is None:
            return
        if self._connected.is_set():  # else it may wait for a Ray that never answers
            driver.end_orders()
            await asyncio.wait({life}, timeout=CLOSE_S)
        driver.signal(signal.SIGKILL)
        await asyncio.wait({life})

    async def _driver_now(self) -> Child:
        """The driver that runs, else a new one. OSError where none can be started."""
        async with self._starting:
            if self._driver is None:
                self._failure, self._exit_code = LOST, LOST_EXIT_CODE
                self._connected.clear()
                driver = await start_child(
                    tethered(self._argv), on_event=self._on_event, on_line=self._on_line, is_told=True
                )
                self._driver, self._life = driver, asyncio.create_task(self._live(driver))
            return self._driver

    async def _live(self, driver: Child) -> None:
        ending = asyncio.create_task(driver.wait())
        timeout_s = CONNECT_S if self._plan.address else START_RAY_S
        await _first(self._connected.wait(), ending, timeout_s=timeout_s)
        if not (ending.done() or self._connected.is_set()):
            where = f"--ray-address: the Ray at {self._plan.address}" if self._plan.address else "--launcher ray: Ray"
            self._failure, self._exit_code = f"{where} did not answer within {timeout_s:g} s", STARTUP_EXIT_CODE
            driver.signal(signal.SIGKILL)
        await ending
        self._driver = None
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.on_event("failed", {"message": self._failure, "exit_code": self._exit_code})
            process.end(self._exit_code)

    def _on_event(self, event: str, fields: dict[str, object]) -> None:
        match event, fields:
            case "connected", {"nodes": list(nodes)}:
                self._nodes = nodes
                self._connected.set()
            case "failed", _:
                self._failure, self._exit_code = describe(event, fields), STARTUP_EXIT_CODE
            case "said", {"number": int(number), "event_said": str(said), "fields": dict(of_it)}:
                if number in self._processes:
                    self._processes[number].on_event(said, of_it)
            case "line", {"number": int(number), "text": str(text)}:
                if number in self._processes:
                    self._processes[number].on_line(text)
            case "ended", {"number": int(number), "code": int(code)}:
                if (process := self._processes.pop(number, None)) is not None:
                    process.end(code)
            case _:
                self._on_line(describe(event, fields))


@contextlib.asynccontextmanager
async def ray_launcher(plan: RayPlan, on_line: OnLine) -> AsyncIterator[RayLauncher]:
    """Connected within the block. ConfigError where Ray is not installed, not reached, or has too little."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(["--launcher ray: Ray is not installed; it is the extra `ray`: pip install 'moonshard[ray]'"])
    with tempfile.TemporaryDirectory(prefix="moonshard-", ignore_cleanup_errors=True) as folder:
        launcher = RayLauncher(plan, Path(folder), on_line)
        try:
            nodes = await launcher.connect()
            if faults := lacking(plan.workers, nodes):
                raise ConfigError([f"--launcher ray: {fault}" for fault in faults])
            yield launcher
        finally:
            await launcher.close()


async def _first(
    wanted: Coroutine[None, None, object], other: asyncio.Task[Any], timeout_s: float | None = None
) -> None:
    """Until one of them is done, or the time is over."""
    waiting = asyncio.create_task(wanted)
    await asyncio.wait({waiting, other}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that workers are given on their nodes as here."""
    return {name: value for name, value in environ.items() if name.startswith(CARRIED) and name not in NOT_CARRIED}
