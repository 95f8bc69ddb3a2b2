"""Which resources the processes of a deployment take, whether a cluster's nodes have them, and how close they must be.

Pure, and without Ray. A worker is a placement group, each of its processes a bundle of it: all on one node where one
node has enough for all, else spread over as many as there are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CPU = "CPU"

Resources = Mapping[str, float]
Strategy = Literal["STRICT_PACK", "SPREAD"]


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """A worker, and what each of its processes takes."""

    name: str
    num_processes: int
    bundle: Resources

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [dict(self.bundle) for _ in range(self.num_processes)]

    @property
    def total(self) -> Resources:
        return {resource: self.num_processes * amount for resource, amount in self.bundle.items()}


def process_bundle(num_devices: int, device: str | None) -> dict[str, float]:
    """What a process with so many devices takes: a CPU for each, or, of the resource `device`, one, and a CPU."""
    if device is None or device == CPU:
        return {CPU: num_devices}
    return {CPU: 1, device: num_devices}


def strategy_of(needs: WorkerNeeds, nodes: Sequence[Resources]) -> Strategy:
    """By what nodes have in all, used or not: a gang that fits on one node waits for room there."""
    return "STRICT_PACK" if any(_fits(needs.total, node) for node in nodes) else "SPREAD"


def lacking(workers: Sequence[WorkerNeeds], nodes: Sequence[Resources]) -> list[str]:
    """Why these nodes can never have these workers, even if nothing else ran there; empty where they may.

    Each process must fit on some node, and all of them in the cluster.
    """
    faults = [
        f"{worker.name} needs {told(worker.bundle)} on one node; {_largest(worker.bundle, nodes)}"
        for worker in workers
        if not any(_fits(worker.bundle, node) for node in nodes)
    ]
    if faults:
        return faults
    needed, there = _summed([worker.total for worker in workers]), _summed(nodes)
    return [
        f"the workers need {told({resource: amount})} in all; the cluster has {told({resource: there[resource]})}"
        for resource, amount in needed.items()
        if amount > there[resource]
    ]


def no_room(needs: WorkerNeeds, strategy: Strategy, nodes: Sequence[Resources], free: Resources) -> str:
    """What a worker waits for in vain: the nodes' resources in all, and what of the cluster's is free."""
    where = "on one node" if strategy == "STRICT_PACK" else f"in {needs.num_processes} equal parts"
    there = _summed(nodes)
    told_of = "; ".join(
        f"of {there[resource]:g} {resource} on {len(nodes)} nodes {free.get(resource, 0):g} are free"
        for resource in needs.total
    )
    return f"{needs.name} needs {told(needs.total)} {where}; {told_of}"


def told(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {resource}" for resource, amount in resources.items())


def _fits(wanted: Resources, node: Resources) -> bool:
    return all(node.get(resource, 0) >= amount for resource, amount in wanted.items())


def _largest(wanted: Resources, nodes: Sequence[Resources]) -> str:
    if not nodes:
        return "there is no node"
    most = {resource: max(node.get(resource, 0) for node in nodes) for resource in wanted}
    return f"the most that one has is {told(most)}" if len(nodes) > 1 else f"the only one has {told(most)}"


def _summed(parts: Sequence[Resources]) -> Counter[str]:
    total = Counter[str]()
    for part in parts:
        total.update(dict(part))  # pyright: ignore[reportArgumentType]  # it adds what can be added
    return total
