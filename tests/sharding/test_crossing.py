"""What crosses between two stages' meshes by collectives arrives whole, and in the order in which it was sent."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from moonshard.sharding.crossing import Across, Turns
from moonshard.sharding.mesh import BY_PARTITION, build_mesh
from moonshard.sharding.shape import MeshShape

pytestmark = pytest.mark.xdist_group("jax")
SHAPE = (8, 3, 16)


@pytest.mark.parametrize(
    "mesh", [MeshShape(pipe=2), MeshShape(pipe=2, tensor=2), MeshShape(pipe=2, data=2), MeshShape(pipe=2, expert=4)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_that_cross_both_ways_arrive_whole_and_in_order(mesh: MeshShape, dtype: str):
    first, last = build_mesh(mesh, 0), build_mesh(mesh, 1)
    turns: Turns = {}
    on = Across(first, last, jax.ShapeDtypeStruct(SHAPE, dtype), turns)
    back = Across(last, first, jax.ShapeDtypeStruct(SHAPE[:1], "int32"), turns)
    sent = [np.random.default_rng(seed).standard_normal(SHAPE).astype(dtype) for seed in range(20)]
    tokens = [np.arange(8, dtype=np.int32) + number for number in range(20)]
    arrived = []
    for one, row in zip(sent, tokens, strict=True):
        hidden = on(jax.device_put(one, NamedSharding(first, BY_PARTITION)))
        arrived.append((hidden, back(jax.device_put(row, NamedSharding(last, BY_PARTITION)))))
    for (hidden, newest), one, row in zip(arrived, sent, tokens, strict=True):
        assert hidden is not None
        assert newest is not None
        assert hidden.sharding == NamedSharding(last, BY_PARTITION)
        assert newest.sharding == NamedSharding(first, BY_PARTITION)
        assert [shard.data.tolist() for shard in hidden.addressable_shards] == [
            one[shard.index].tolist() for shard in hidden.addressable_shards
        ]
        np.testing.assert_array_equal(np.asarray(newest), row)
    assert {int(turn[0]) for turn in turns.values()} == {40}
