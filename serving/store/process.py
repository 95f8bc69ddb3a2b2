"""Mooncake Store's master and client, held by one process: started together, ended together.

They belong together. The master says for 10 s more that a client which has ended has all its blocks, and a client that
comes back behind it may be taken for the one before: so when one ends by itself, this process ends the other and
itself, and whoever has started it starts it again, empty. Workers count what they ask for meanwhile as misses.

The master may be somebody else's, for several machines. Whether that can be reached is no condition for serving, and is
not waited for: the client asks again by itself until it can.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from moonshard.kv.listening import listening_ports
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.serving.config.keys import Config, ConfigError
from moonshard.serving.config.kv_ports import library_ports, store_ports
from moonshard.serving.config.loopback import is_loopback
from moonshard.serving.deploy.life import Life, stop_signals
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.deploy.status_pipe import Status
from moonshard.serving.engine.capacity.memory import free_memory_bytes
from moonshard.serving.store.ports import StorePorts, free_ports
from moonshard.serving.store.processes import MooncakeProcesses, StoreSettings
from moonshard.serving.store.words import NativeWords

START_S = 20.0
ELSEWHERE_S = 2.0  # for the client to find somebody else's master
STOP_S = 2.0  # of each
KEY = "kv.store.dram_bytes"

logger = logging.getLogger(__name__)


async def run_store(config: Config, *, status: Status, start: ProcessStart) -> int:
    """Serves until told to stop; the exit code. ConfigError where it cannot be started."""
    with stop_signals() as stop:
        life = Life(role="store", status=status, start=start, stop=stop, drain_timeout_s=STOP_S)
        processes = _processes_for(config)
        starting, stopping = asyncio.create_task(_start(processes)), asyncio.create_task(stop.wait())
        try:
            with start.timings.phase("mooncake"):
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    return 0
                await starting
            _check_ports(processes, config.kv.ports)
            return await life.live(ServedStore(processes), name=processes.ports.client_address, recorder=None)
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.to_thread(processes.stop, STOP_S)


@dataclass(frozen=True, slots=True)
class ServedStore:
    """The processes as `deploy.life` drives them: ready from the first, until one of them ends."""

    processes: MooncakeProcesses

    async def failure(self) -> BaseException:
        ended = [asyncio.create_task(asyncio.to_thread(process.wait)) for process in self.processes.all]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        return StoreUnavailable(done.pop().result())

    async def set_serving(self, is_serving: bool) -> None:
        pass

    async def wait_ready(self) -> None:
        pass

    async def wait_not_ready(self) -> None:
        await asyncio.Event().wait()

    def on_ready(self) -> Mapping[str, object]:
        """What stands open, in words."""
        opened = ", ".join(map(str, sorted(_open_ports(self.processes))))
        told = f"ready; at {self.processes.ports.client_address}"
        told += f"; open to whoever reaches them are its ports: {opened}" if opened else ""
        return {"message": f"{told}; to all on this machine {_opened_here(self.processes)}"}

    def on_told(self) -> None:
        pass

    def begin_drain(self) -> None:
        pass

    async def wait_idle(self) -> None:
        pass

    async def cut_off(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        logger.error("%s; what it held is lost", error)


def _processes_for(config: Config) -> MooncakeProcesses:
    store = config.kv.store
    if store.client is None:
        raise ConfigError(["kv.store.client: name the address at which workers find it"])
    if store.dram_bytes > (free := free_memory_bytes()):
        raise ConfigError([f"{KEY}: {store.dram_bytes} bytes are more than this machine has left ({free})"])
    host, _, port = store.client.rpartition(":")
    master, metrics = store_ports(config)[1:] or free_ports(2, but=int(port))  # of no use with somebody else's master
    ports = StorePorts(master=master, metrics=metrics, client=int(port), client_host=host)
    settings = StoreSettings(segment_bytes=store.dram_bytes, ports=library_ports(config))
    try:
        return MooncakeProcesses(ports, settings, master_address=store.master, on_line=NativeWords(logger.warning))
    except StoreUnavailable as error:
        raise ConfigError([f"{KEY}: {error}"]) from error


async def _start(processes: MooncakeProcesses) -> None:
    has_own_master = processes.master is not None
    for process in processes.all:
        try:
            process.start()  # on this thread, with which it ends
        except StoreUnavailable as error:
            key = "kv.store.client" if process is processes.client else "kv.ports"
            raise ConfigError([f"{key}: {error}"]) from error
        try:
            await asyncio.to_thread(process.wait_until_it_answers, START_S if has_own_master else ELSEWHERE_S)
        except StoreUnavailable as error:
            if has_own_master:
                raise ConfigError([f"{KEY}: {error}"]) from error
            logger.warning("%s; until it answers nothing is found in Mooncake Store", error)


def _open_ports(processes: MooncakeProcesses) -> frozenset[int]:
    """Those at which the client listens on all interfaces, and beyond loopback that at which it is called."""
    if processes.client.pid is None:
        return frozenset()
    at_loopback = {processes.ports.client} if is_loopback(processes.ports.client_host) else set()
    return listening_ports(processes.client.pid) - at_loopback


def _opened_here(processes: MooncakeProcesses) -> str:
    """What is on loopback, and what has no address."""
    ports = processes.ports
    of_master = f"its master at {ports.master} with metrics at {ports.metrics}, and " if processes.master else ""
    of_client = f"its client at {ports.client} and " if is_loopback(ports.client_host) else ""
    return f"{of_master}{of_client}the socket {ports.client_socket}"


def _check_ports(processes: MooncakeProcesses, ports: tuple[int, int] | None) -> None:
    """ConfigError where the library listens outside the range that it was given, which it does without a word."""
    outside = [port for port in _open_ports(processes) if ports is not None and not ports[0] <= port <= ports[1]]
    if ports is not None and outside:
        raise ConfigError([f"kv.ports: Mooncake passed over {ports[0]} to {ports[1]} and listens at {min(outside)}"])
