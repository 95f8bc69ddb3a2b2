"""Nodes and placement groups of the Ray cluster that this process drives: a group for each worker, made when that is
placed.

Ray would place a group anew by itself when a node is lost, but not what ran in it. So a worker that comes back gets a
new group, and the old one goes with all that is left in it: a gang as a unit.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from moonshard.serving.deploy.on_ray.orders import Start
from moonshard.serving.deploy.on_ray.placement import WorkerNeeds, no_room, strategy_of

PLACING_S = 30.0  # for a worker to find room; one that a lost node had is known as lost within this time
LOOK_S = 1.0


class NoRoom(Exception):
    """The cluster has no place for a worker now; in words, what it lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    id: str
    address: str
    resources: Mapping[str, float]  # in all


class Cluster:
    """The groups of all workers, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def nodes(self) -> list[Node]:
        """Those that are alive, as far as Ray knows."""
        return [
            Node(id=node["NodeID"], address=node["NodeManagerAddress"], resources=node["Resources"])
            for node in ray.nodes()
            if node["Alive"]
        ]

    async def group_for(self, start: Start) -> Any:
        """A group that has room: for the leader of a gang a new one, for the others that of their leader. NoRoom where
        there is none.
        """
        if start.member == 0:
            await self._place(WorkerNeeds(start.gang, start.num_members, start.bundle))
        if start.gang not in self._groups:
            raise NoRoom(f"{start.gang} has lost its place")
        return self._groups[start.gang]

    async def _place(self, needs: WorkerNeeds) -> None:
        self.free(needs.name)
        strategy = strategy_of(needs, [node.resources for node in self.nodes()])
        group = placement_group(needs.bundles, strategy=strategy, name=f"moonshard {needs.name}")
        self._groups[needs.name] = group
        for _ in range(round(PLACING_S / LOOK_S)):
            if await asyncio.to_thread(group.wait, LOOK_S):
                return
        nodes = [node.resources for node in self.nodes()]
        self.free(needs.name)
        raise NoRoom(no_room(needs, strategy, nodes, ray.available_resources()))

    def address_of(self, group: Any, member: int) -> str:
        """The address of the node that has this member's bundle. NoRoom where that is gone."""
        node_id = placement_group_table(group)["bundles_to_node_id"].get(member)
        for node in self.nodes():
            if node.id == node_id:
                return node.address
        raise NoRoom("its node went away as it was placed")

    def free(self, gang: str) -> None:
        """Gives a worker's place back, and ends what runs there. Does nothing where it has none."""
        if (group := self._groups.pop(gang, None)) is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(group)
