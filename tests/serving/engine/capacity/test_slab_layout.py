"""Which stage's devices own which part of a block, where shares of layers come out unequal, or not at all."""

import pytest

from moonshard.models.spec import KvGroup
from moonshard.serving.engine.capacity.slab_layout import owners_by_stage, slab_layout
from moonshard.sharding.rules import Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard


def owners(layers: list[int], tensor: int, rules: Rules | None = None) -> list[list[int]]:
    group = KvGroup(name="kv", layers=tuple(range(sum(layers))), num_features=2, dtype="float32")
    mesh = MeshShape(pipe=len(layers), tensor=tensor)
    shard = Shard(mesh=mesh) if rules is None else Shard(mesh=mesh, rules=rules)
    return owners_by_stage(slab_layout([group], 16, shard, layers).groups[0], layers)


@pytest.mark.parametrize(
    ("layers", "tensor", "expected"),
    [
        ([4], 2, [[0, 1]]),
        ([2, 3], 1, [[0], [1]]),
        ([2, 3], 2, [[0, 1], [2, 3]]),
        ([1, 3], 2, [[0], [1, 2]]),  # a layer is one device's: the next stage's owners are numbered from there
        ([1, 1, 2], 4, [[0], [1], [2, 3]]),
    ],
)
def test_owners_of_a_stage_are_its_devices_in_their_order(layers: list[int], tensor: int, expected: list[list[int]]):
    assert owners(layers, tensor) == expected


def test_context_parallel_each_stage_has_an_owner_for_each_part_of_the_tokens():
    assert owners([1, 3], 2, Rules(kv_tokens=("tensor",))) == [[0, 1], [2, 3]]
