"""What the measuring of a fault needs of a deployment, wherever its processes run."""

from collections.abc import Sequence
from typing import Protocol

import grpc

from moonshard.rpc import link_pb2
from tests.cluster.faults import what_is_held
from tests.cluster.matrix.deployments.machines import Machine


class Deployment(Protocol):
    """Of gateways and workers, each by its name. What asks a gateway raises TransportError where none answers."""

    @property
    def gateways(self) -> Sequence[str]: ...

    @property
    def leaders(self) -> list[str]:
        """The workers, each by the process that gateways know."""
        ...

    def url(self, gateway: str) -> str: ...

    def machine(self, name: str) -> Machine:
        """Where a process is now."""
        ...

    def worker_of(self, process: str) -> str:
        """The worker that the process is a part of."""
        ...

    def states(self, gateway: str, timeout_s: float = 1.0) -> dict[str, str]:
        """How the gateway has each worker: `ready`, or something else."""
        ...

    def num_storing(self) -> int:
        """How many workers have Mooncake Store, as far as a gateway knows; asked only where there is one."""
        ...

    @property
    def steady_s(self) -> float:
        """For how long it must be whole on end until nothing more comes of a fault."""
        ...

    def is_whole(self) -> bool:
        """Whether all gateways have all workers, and these the store where there is one."""
        ...

    def inspect(self, worker: str) -> link_pb2.Inspection: ...

    def restore(self, machine: Machine) -> None:
        """Makes it whole again where nobody else does: a machine that was lost with what ran there."""
        ...

    def log(self) -> str: ...


def held_by(deployment: Deployment) -> dict[str, str]:
    """What workers still hold, by worker; empty where all is as it began. Who does not answer may hold anything."""
    found = {name: _held(deployment, name) for name in deployment.leaders}
    return {name: what for name, what in found.items() if what}


def _held(deployment: Deployment, worker: str) -> str:
    try:
        return what_is_held(deployment.inspect(worker))
    except grpc.RpcError as error:
        return f"it does not answer: {error}"
