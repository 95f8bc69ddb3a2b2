"""What the supervisor of `serve` starts where every process has a machine: gateways, workers, what is beside them."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from moonshard.serving.config.keys import (
    Config,
    KvConfig,
    WorkerRole,
    command_of,
    processes_of,
    with_worker_at,
    workers_of,
)
from moonshard.serving.config.loopback import LOOPBACK
from moonshard.serving.config.reading import as_overrides
from moonshard.serving.deploy.children.supervisor import Command
from moonshard.serving.store.ports import StorePorts
from moonshard.serving.store.processes import StoreSettings, master_argv
from tests.cluster.matrix.deployments.machines import Machine, Network

GATEWAYS = ("gateway", "gateway 1")
MASTER, STORE = "store master", "store"
PORTS = {"gateway.port": 8000, "gateway.grpc_port": 50051, "gateway.registry_port": 50052}
WORKER_PORT, MASTER_PORT, STORE_PORT = 50070, 50040, 50041
# The master knows nothing of us: what it is told behind its own words, the shell has and answers.
READY = """echo '{"event": "ready"}' >&"$2"; exec "$0" """


class ApartCommands:
    """Each process's command on its machine. The first gateway is the supervisor's, the second one beside it.

    With Mooncake Store its master has a machine, and all workers and the store's client are on one, whose memory it is.
    """

    def __init__(self, config: Config, network: Network) -> None:
        self._has_store = config.kv.store.enabled
        gangs = {name: processes_of(config, role) for name, role in workers_of(config).items()}
        names = [name if index == 0 else f"{name}.{index}" for name, number in gangs.items() for index in range(number)]
        self.machines: dict[str, Machine] = {name: network.add(name) for name in GATEWAYS}
        if self._has_store:
            self.machines[MASTER] = network.add(MASTER)
            self.machines |= dict.fromkeys((STORE, *names), network.add(STORE))
        else:
            self.machines |= {name: network.add(name) for name in names}
        self._ports = {name: WORKER_PORT + number for number, name in enumerate(names)}
        registries = tuple(f"{self.machines[name].address}:{PORTS['gateway.registry_port']}" for name in GATEWAYS)
        self._config = replace(config, worker=replace(config.worker, gateways=registries))
        if self._has_store:
            self._config = replace(self._config, kv=self._with_store(config.kv))

    def address(self, worker: str) -> str:
        return f"{self.machines[worker].address}:{self._ports[worker]}"

    @property
    def beside(self) -> dict[str, Command]:
        found: dict[str, Command] = {name: lambda _, name=name: self._gateway(name) for name in GATEWAYS[1:]}
        if self._has_store:
            found |= {
                MASTER: lambda _: self._master(),
                STORE: lambda _: self._argv(STORE, STORE, self._without_gateways()),
            }
        return found

    def _with_store(self, kv: KvConfig) -> KvConfig:
        host, master = self.machines[STORE].address, self.machines[MASTER].address
        store = replace(kv.store, client=f"{host}:{STORE_PORT}", master=f"{master}:{MASTER_PORT}")
        return replace(kv, host=host, store=store)

    def _master(self) -> list[str]:
        at = self.machines[MASTER].address
        ports = StorePorts(master=MASTER_PORT, metrics=MASTER_PORT + 2, client=STORE_PORT, client_host=at)
        argv = [word.replace(LOOPBACK, at) for word in master_argv(ports, StoreSettings(segment_bytes=0))]
        shell = f"{READY} {shlex.join(argv[1:])}"
        return self.machines[MASTER].command("bash", "-c", shell, argv[0])

    @property
    def workers(self) -> dict[str, Command]:
        return {name: partial(self._worker, name, role) for name, role in workers_of(self._config).items()}

    def followers(self, worker: str, address: str) -> dict[str, Command]:
        role = workers_of(self._config)[worker]
        return {
            f"{worker}.{index}": partial(self._follower, f"{worker}.{index}", role, index, address)
            for index in range(1, processes_of(self._config, role))
        }

    def gateway(self, workers: Sequence[str], previous: Mapping[str, object] | None) -> list[str]:
        del workers, previous  # workers register, and ports stay
        return self._gateway(GATEWAYS[0])

    def _gateway(self, name: str) -> list[str]:
        at = self.machines[name].address
        there = replace(self._config.gateway, host=at, registry_host=at)
        return self._argv(name, "gateway", replace(self._without_gateways(), gateway=there))

    def _without_gateways(self) -> Config:
        """For what is no worker, and has no host as one."""
        return replace(self._config, worker=replace(self._config.worker, gateways=()))

    def _worker(self, name: str, role: WorkerRole, previous: Mapping[str, object] | None) -> list[str]:
        del previous
        return self._argv(name, command_of(role), self._at(name, role))

    def _follower(
        self, name: str, role: WorkerRole, index: int, leader: str, previous: Mapping[str, object] | None
    ) -> list[str]:
        del previous
        return [*self._argv(name, command_of(role), self._at(name, role)), "--member", str(index), "--leader", leader]

    def _at(self, name: str, role: WorkerRole) -> Config:
        return with_worker_at(self._config, role, self.machines[name].address, self._ports[name])

    def _argv(self, name: str, command: str, config: Config) -> list[str]:
        overrides = [word for override in as_overrides(config) for word in ("--set", override)]
        return self.machines[name].command(sys.executable, "-m", "moonshard.serving.cli", command, *overrides)
