"""A gang's KV plane in one process: real planes, one for each member, and the orders between them in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.slab import Slab
from moonshard.kv.slab_shards import num_held_bytes
from moonshard.rpc import link_pb2
from moonshard.serving.gang.orders import Orders
from moonshard.serving.gang.part import PlanePart, ready_message
from moonshard.serving.gang.plane import GangPlane
from moonshard.serving.transfer.plane import KvPlane, Plane
from moonshard.sharding.layout import BlockShape, GroupLayout, Layout, Tile, tile_group

BLOCK = BlockShape(name="kv", dtype="float32", itemsize_bytes=4, block_size=8, num_layers=6, num_features=4)
NUM_CELLS = 5

Held = Sequence[Sequence[set[int]]]  # by member, by partition: owners
Transported = Callable[[InprocNetwork], InprocTransport]

# Of meshes whose devices are shared out among two processes, in their order.
TENSOR: tuple[GroupLayout, Held] = (tile_group(BLOCK, layers_per_stage=(3, 3)), [[{0}], [{1}]])
DATA: tuple[GroupLayout, Held] = (tile_group(BLOCK), [[{0}, set()], [set(), {0}]])
TOKENS: tuple[GroupLayout, Held] = (tile_group(BLOCK, num_token_shards=4), [[{0, 1}], [{2, 3}]])
BOTH: tuple[GroupLayout, Held] = (
    tile_group(BLOCK, layers_per_stage=(3, 3)),
    [[{0, 1}, {0}, set()], [set(), {1}, {0, 1}]],  # data 3 tensor 2: one partition lies across
)
FEW: tuple[GroupLayout, Held] = (tile_group(BLOCK, layers_per_stage=(6,)), [[{0}], [set()]])  # tensor 2, one in vain
ALONE: tuple[GroupLayout, Held] = (tile_group(BLOCK, layers_per_stage=(4, 2)), [[{0, 1}]])
ARRANGED = {"tensor": TENSOR, "data": DATA, "tokens": TOKENS, "both": BOTH, "few": FEW, "alone": ALONE}


@dataclass
class Members:
    """One worker's members; the first leads, or is alone. `told` are the orders that the followers have had."""

    layout: Layout
    planes: list[KvPlane]
    parts: dict[int, PlanePart] = field(default_factory=dict[int, PlanePart])
    told: list[link_pb2.GangOrder] = field(default_factory=list[link_pb2.GangOrder])
    faults: list[BaseException] = field(default_factory=list[BaseException])
    silent: set[int] = field(default_factory=set[int])  # members that get their orders and say nothing

    def __post_init__(self):
        self.orders = Orders(len(self.planes), self._tell)
        for member, plane in enumerate(self.planes[1:], start=1):
            self.parts[member] = PlanePart(plane, self._answers_of(member), self.faults.append)
        own, *others = self.planes
        self.plane: Plane = GangPlane(own, self.orders, list(map(ready_message, others))) if others else own

    def _tell(self, order: link_pb2.GangOrder) -> None:
        self.told.append(link_pb2.GangOrder.FromString(order.SerializeToString()))
        for member, part in self.parts.items():
            if member not in self.silent:
                part.obey(link_pb2.GangOrder.FromString(order.SerializeToString()))

    def _answers_of(self, member: int) -> Callable[[link_pb2.FollowerAnswer], None]:
        def answer(what: link_pb2.FollowerAnswer) -> None:
            self.orders.answered(member, link_pb2.FollowerAnswer.FromString(what.SerializeToString()))

        return answer

    def export(self, ticket: int, partition: int, blocks: np.ndarray) -> np.ndarray:
        """As a step would on all members; the leader's part."""
        for member, part in self.parts.items():
            part.exported(ticket, self.part_of(member, partition, blocks))
        return self.part_of(0, partition, blocks)

    def part_of(self, member: int, partition: int, blocks: np.ndarray) -> np.ndarray:
        """What a member has of blocks [b, layers, block_size, features]."""
        own = self.own(member, partition)
        return blocks[:, slice(*own.layers), slice(*own.tokens), slice(*own.features)]

    def own(self, member: int, partition: int) -> Tile:
        return self.planes[member]._shards[partition].own

    def land(self, ticket: int, partition: int, num_blocks: int) -> list[np.ndarray]:
        """What each member would land, in its order."""
        own = self.plane.take(ticket)
        return [own, *(part.payload(ticket, num_blocks) for part in self.parts.values())]

    @property
    def hold_nothing(self) -> bool:
        """No slab, and no private copy of a member."""
        return not any(plane._slab.bytes.any() or plane._copies for plane in self.planes)


def members(
    network: InprocNetwork, arranged: tuple[GroupLayout, Held], transported: Transported = InprocTransport
) -> Members:
    group, held = arranged
    layout = Layout(version=1, groups=(group,))
    planes = [
        KvPlane(
            transported(network),
            Slab(NUM_CELLS, max(1, sum(num_held_bytes(group, owners) for owners in own))),
            name="inproc",
            layout=layout,
            fingerprint="",
            num_partitions=len(own),
            held=own,
            num_cells=NUM_CELLS,
        )
        for own in held
    ]
    return Members(layout, planes)


def blocks(num: int, seed: int = 0) -> np.ndarray:
    shape = (num, BLOCK.num_layers, BLOCK.block_size, BLOCK.num_features)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
