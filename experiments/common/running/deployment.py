"""Gateway, workers and what is beside them, each started by its own command.

A worker can be pinned to a core, killed, and come back.

`server` runs one `moonshard serve` instead, which restarts what dies and pins nothing. A worker pinned to one core has
one XLA thread of each kind (by its threads' names): XLA counts the cores that a process may use.
No process outlives the thread that started it, even where that is killed. All run on this machine.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from moonshard.experiments.common.running.server import RunningServer, ServerFailed
from moonshard.serving.commands.serve import ChildCommands
from moonshard.serving.config.keys import Config
from moonshard.serving.deploy.children.tether import tethered

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
LINK_TIMEOUT_S = 60.0
POLL_S = 0.05
WORKER_UP = "moonshard_worker_up"


@dataclass(kw_only=True, slots=True)
class Process:
    """One moonshard command as a child process, pinned to one core where `core` is set."""

    name: str
    log_path: Path
    environment: Mapping[str, str]
    core: int | None = None
    popen: subprocess.Popen[bytes] | None = None

    def start(self, argv: Sequence[str]) -> None:
        """Starts a new process; its log replaces the one before."""
        with self.log_path.open("wb") as log, _on_core(self.core):
            self.popen = subprocess.Popen(
                tethered(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.environment),
            )

    @property
    def running(self) -> subprocess.Popen[bytes]:
        if self.popen is None:
            raise ServerFailed(f"{self.name} was never started")
        return self.popen

    def wait_for(self, text: str) -> None:
        """Waits until it has printed that. ServerFailed if it ends, or takes too long."""
        _wait_until(lambda: text in self._log() or self.running.poll() is not None, START_TIMEOUT_S, self.name)
        if text not in self._log():
            self.check_runs()

    def check_runs(self) -> None:
        """ServerFailed with its last output, if it has ended."""
        if self.running.poll() is not None:
            raise ServerFailed(f"{self.name} ended: {self._log().strip()[-500:]}")

    def said(self, name: str) -> str:
        """The address that it printed for this listener."""
        self.wait_for("moonshard listening")
        found = re.search(rf"moonshard listening.*\b{name}=(\S+)", self._log())
        if found is None:
            raise ServerFailed(f"{self.name} does not say its {name}")
        return found[1]

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()

    def stop(self) -> None:
        """Stops it by SIGTERM, or SIGKILL where that takes too long. Nothing happens where it is not running."""
        if self.popen is None or self.popen.poll() is not None:
            return
        self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _log(self) -> str:
        return self.log_path.read_text(errors="replace")


@dataclass(kw_only=True, slots=True)
class Deployment:
    """Workers by name ("decode 0"), the gateway in front of them, and what is beside them."""

    commands: ChildCommands
    workers: dict[str, Process]
    gateway: Process
    beside: dict[str, Process] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)  # of the workers
    begun_s: float = field(default_factory=time.perf_counter)
    ready_s: float = 0.0

    @property
    def processes(self) -> dict[str, Process]:
        """All of them, in the order in which they are started."""
        return {**self.beside, **self.workers, "gateway": self.gateway}

    @property
    def server(self) -> RunningServer:
        """The deployment as it is now: a worker that was started again is another process."""
        return RunningServer(
            http=self.gateway.said("http"),
            grpc=self.gateway.said("grpc"),
            model=self.commands.config.model.name,
            begun_s=self.begun_s,
            ready_s=self.ready_s,
            pids={name: process.running.pid for name, process in self.processes.items()},
        )

    def start(self) -> None:
        for name, process in self.beside.items():
            process.start(self.commands.beside[name](None))
        for name, process in self.workers.items():
            process.start(self.commands.workers[name](None))
        self.addresses = {name: process.said("address") for name, process in self.workers.items()}
        self.gateway.start(self.commands.gateway(list(self.addresses.values()), None))
        for process in self.processes.values():
            process.wait_for("moonshard ready")
        self._wait_linked()
        self.ready_s = time.perf_counter() - self.begun_s

    def restart(self, name: str) -> None:
        """Starts a killed worker again at its address; returns when the gateway has a link to it."""
        self.workers[name].start(self.commands.workers[name]({"address": self.addresses[name]}))
        self.workers[name].wait_for("moonshard ready")
        self._wait_linked()

    def stop(self) -> None:
        """Stops all processes, even where the caller is interrupted: what has not ended by then is killed."""
        served, beside = _alive([self.gateway, *self.workers.values()]), _alive(self.beside.values())
        try:
            _end(served)
            _end(beside)
        finally:
            for popen in (*served, *beside):
                popen.kill()
            for popen in (*served, *beside):
                popen.wait()

    def _wait_linked(self) -> None:
        server = self.server
        _wait_until(lambda: self._is_linked(server), LINK_TIMEOUT_S, "the gateway's links")

    def _is_linked(self, server: RunningServer) -> bool:
        """Whether the gateway has a link to all workers. ServerFailed where a process has ended."""
        for process in self.processes.values():
            process.check_runs()
        try:
            return server.counters().get(WORKER_UP) == len(self.workers)
        except httpx.HTTPError:  # it may end while it is asked
            return False


@contextmanager
def deployed(
    config: Config,
    environment: Mapping[str, str],
    *,
    cores: Sequence[int] | None = None,
    logs: Path | None = None,
) -> Iterator[Deployment]:
    """Runs all that the configuration asks for, ready during the block. `cores`: one per worker, prefill first.

    What the processes say goes into the folder `logs`; without one it is thrown away at the end.
    ServerFailed if it cannot start.
    """
    config = replace(config, gateway=replace(config.gateway, port=0, grpc_port=0))
    commands = ChildCommands(config)
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(TemporaryDirectory()))

        def process(name: str, core: int | None = None) -> Process:
            log_path = folder / f"{name.replace(' ', '_')}.log"
            return Process(name=name, log_path=log_path, environment=environment, core=core)

        pinned = cores or [None] * len(commands.workers)
        workers = {name: process(name, core) for name, core in zip(commands.workers, pinned, strict=True)}
        beside = {name: process(name) for name in commands.beside}
        deployment = Deployment(commands=commands, workers=workers, gateway=process("gateway"), beside=beside)
        try:
            deployment.start()
            yield deployment
        finally:
            deployment.stop()


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Inside the block, processes that this thread starts may use that core only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _alive(processes: Iterable[Process]) -> list[subprocess.Popen[bytes]]:
    return [each.popen for each in processes if each.popen and each.popen.poll() is None]


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Tells all to end, and waits for them as long as that may take."""
    for popen in processes:
        popen.send_signal(signal.SIGTERM)
    for popen in processes:
        with suppress(subprocess.TimeoutExpired):
            popen.wait(STOP_TIMEOUT_S)


def _wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls a condition of another process, which notifies nobody. ServerFailed where it does not come true."""
    deadline_s = time.perf_counter() + timeout_s
    while not condition():
        if time.perf_counter() > deadline_s:
            raise ServerFailed(f"{what}: not there after {timeout_s:g} s")
        time.sleep(POLL_S)
