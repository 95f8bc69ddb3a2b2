"""A deployment whose processes have a machine each: started, restarted and ended by the supervisor of `serve`.

Members of a gang know each other by address, workers register with two gateways, and whoever loses its machine's cable
is cut off from all of them, but not from the supervisor, which is a pipe away.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import workers_of
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.children.role import RestartLimits
from moonshard.serving.deploy.children.supervisor import Supervisor
from tests.cluster.conftest import metric, wait_until
from tests.cluster.faults import READY_TIMEOUT_S
from tests.cluster.matrix.deployments.commands import GATEWAYS, PORTS, ApartCommands
from tests.cluster.matrix.deployments.machines import Machine, Network
from tests.dialling import inspect


class Log:
    """A supervisor's reporter: all that is said, with the second of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def event(self, child: str, event: str, fields: Mapping[str, object]) -> None:
        if event not in ("timings", "progress"):
            self.line(child, f"<{event}> {dict(fields)}")

    def line(self, child: str, text: str) -> None:
        self._file.write(f"{time.monotonic():.3f} [{child}] {text}\n")

    def note(self, text: str) -> None:
        self.line("supervisor", text)


class Apart:
    """The running deployment, as who measures it sees it."""

    gateways = GATEWAYS
    steady_s = 0.0

    def __init__(self, settings: Mapping[str, object], log_path: Path) -> None:
        own = {**PORTS, "gateway.registry": "grpc"}
        config = load_config(None, [f"{key}={value}" for key, value in {**settings, **own}.items()])
        self.network = Network()
        self.log_path = log_path
        self.config = config
        self._commands = ApartCommands(config, self.network)
        self._supervisor = Supervisor(self._commands, Log(self.log_path), RestartLimits())
        self._is_started, self._is_over = threading.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def running(self) -> "Iterator[Apart]":
        self._thread.start()  # which starts all processes, and outlives them: they end with the thread that did
        try:
            assert self._is_started.wait(READY_TIMEOUT_S), self.log()
            if self._failure is not None:
                raise self._failure
            assert wait_until(self.is_whole, READY_TIMEOUT_S), self.log()
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._is_over.set)
            self._thread.join()
            self.network.end()

    def _run(self) -> None:
        self._loop.run_until_complete(self._supervise())

    async def _supervise(self) -> None:
        try:
            await self._supervisor.start()
            self._is_started.set()
            watching = asyncio.create_task(self._supervisor.watch())
            await self._is_over.wait()
            watching.cancel()
        except BaseException as error:
            self._failure = error
            self._is_started.set()
        finally:
            self._supervisor.kill()
            await self._supervisor.stop()

    # ---- what is there

    @property
    def leaders(self) -> list[str]:
        return list(workers_of(self.config))

    def machine(self, name: str) -> Machine:
        return self._commands.machines[name]

    def worker_address(self, name: str) -> str:
        return self._commands.address(name)

    def worker_of(self, process: str) -> str:
        """The worker that the process is a member of, whichever."""
        return process.partition(".")[0]

    def restore(self, machine: Machine) -> None:
        """Whatever ended there is started again by the supervisor."""

    def log(self) -> str:
        return self.log_path.read_text()[-6000:]

    def url(self, gateway: str) -> str:
        return f"http://{self.machine(gateway).address}:{PORTS['gateway.port']}"

    def states(self, gateway: str, timeout_s: float = 1.0) -> dict[str, str]:
        """How the gateway has each worker, by name. TransportError where it does not answer."""
        found = httpx.get(f"{self.url(gateway)}/health", timeout=timeout_s).json()["workers"]
        return {name: found.get(self.worker_address(name), "not registered") for name in self.leaders}

    def num_storing(self) -> int:
        """How many workers have Mooncake Store, as far as a gateway knows. TransportError likewise."""
        with httpx.Client(base_url=self.url(GATEWAYS[0]), timeout=1.0) as http:
            return int(metric(http, "moonshard_tier_up", tier="store"))

    def is_whole(self) -> bool:
        """Whether both gateways have all workers, and these the store where there is one."""
        try:
            has_store = not self.config.kv.store.enabled or self.num_storing() == len(self.leaders)
            return has_store and all(set(self.states(name).values()) == {"ready"} for name in self.gateways)
        except (httpx.TransportError, ValueError, KeyError):
            return False

    def inspect(self, worker: str) -> link_pb2.Inspection:
        return inspect(self.worker_address(worker), timeout_s=5)
