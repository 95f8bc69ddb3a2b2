"""Several gateways and workers as processes, none of which is listed anywhere: workers register with all gateways."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.cluster.conftest import wait_until
from tests.cluster.faults import FAILOVER_WAIT_S, READY_TIMEOUT_S, SETTINGS, Fleet, Process, end_processes, logs_of

PORTS = {"gateway.port": "http", "gateway.grpc_port": "grpc", "gateway.registry_port": "registry"}


@dataclass
class Registered:
    """Gateways and workers by name. What is started later has a name of its own, and registers as the others do."""

    folder: Path
    settings: Mapping[str, object]
    gateways: dict[str, Process] = field(default_factory=dict)
    workers: dict[str, Process] = field(default_factory=dict)
    ended: list[Process] = field(default_factory=list)

    def seen_by(self, gateway: str) -> Fleet:
        """The workers as that gateway serves over them."""
        return Fleet(self.workers, self.gateways[gateway])

    def start_gateway(self, name: str) -> Process:
        """Returns once it listens: it is ready only once workers have come. One that is started again has its ports."""
        before = self.gateways.get(name)
        if before is not None and before.is_alive:  # a test failed before it had killed it
            before.kill()
        ports = dict.fromkeys(PORTS, 0) if before is None else before.settings
        gateway = Process(name, "gateway", {**self.settings, "gateway.registry": "grpc", **ports}, self._log(name))
        gateway.start()
        gateway.wait_for("moonshard listening")
        gateway.settings |= {key: gateway.said(said).rpartition(":")[2] for key, said in PORTS.items()}
        self.gateways[name] = gateway
        return gateway

    def start_worker(self, name: str, role: str) -> Process:
        """Returns at once."""
        registries = ", ".join(f'"{gateway.said("registry")}"' for gateway in self.gateways.values())
        worker = Process(name, role, {**self.settings, "worker.gateways": f"[{registries}]"}, self._log(name))
        worker.start()
        self.workers[name] = worker
        return worker

    def end_worker(self, name: str) -> int:
        """Asks it to end in order, and returns its exit code."""
        worker = self.workers.pop(name)
        self.ended.append(worker)
        return worker.terminate()

    def wait_linked(self) -> None:
        """Until every gateway has a link to every worker, and to no other."""
        for name in self.gateways:
            assert wait_until(lambda name=name: self.is_linked(name), READY_TIMEOUT_S), self.logs()

    def is_linked(self, gateway: str) -> bool:
        with self.seen_by(gateway).http() as http:
            states = http.get("/health").json()["workers"]
        return states == {
            worker.address: "ready" for worker in self.workers.values() if "moonshard listening" in worker.log()
        } and len(states) == len(self.workers)

    def logs(self) -> str:
        return logs_of(self.processes)

    @property
    def processes(self) -> list[Process]:
        return [*self.gateways.values(), *self.workers.values(), *self.ended]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}.log"


@contextmanager
def running_registered(
    folder: Path,
    *,
    num_gateways: int = 2,
    num_prefill: int = 1,
    num_decode: int = 2,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Registered]:
    """`gateway 0`, `prefill 0` and so on, all of which have found one another; gone after the block."""
    routing = {"routing.failover_wait_s": FAILOVER_WAIT_S, "routing.ttft_slo_s": "none"}
    cluster = Registered(folder, {**SETTINGS, **routing, **settings})
    try:
        for number in range(num_gateways):
            cluster.start_gateway(f"gateway {number}")
        for role, number_of in (("prefill", num_prefill), ("decode", num_decode)):
            for number in range(number_of):
                cluster.start_worker(f"{role} {number}", role)
        cluster.wait_linked()
        yield cluster
    finally:
        end_processes(cluster.processes)
