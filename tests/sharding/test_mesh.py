"""Meshes are built from the devices there are; arrays lie on them where the table says."""

import jax
import pytest
from jax.sharding import PartitionSpec

from moonshard.sharding.mesh import build_mesh, replicated, sharding_of
from moonshard.sharding.rules import DECODE, MESH_AXES, MeshError
from moonshard.sharding.shape import MeshShape

pytestmark = pytest.mark.xdist_group("jax")
EXPERTS = ("layers", "experts", None, "expert_ffw", "embed")


def test_stages_take_their_devices_one_after_another():
    shape = MeshShape(tensor=2, pipe=2)
    found = [device.id for stage in range(2) for device in build_mesh(shape, stage).devices.flat]
    assert found == [device.id for device in jax.devices()[:4]]


def test_a_mesh_larger_than_the_machine_is_refused_with_both_numbers():
    available = len(jax.devices())
    with pytest.raises(MeshError, match=rf"expert={available} tensor=2.* needs {2 * available} devices, cpu has"):
        build_mesh(MeshShape(expert=available, tensor=2))


def test_a_leaf_lies_where_the_table_says():
    mesh = build_mesh(MeshShape(expert=2, tensor=4))
    assert dict(mesh.shape) == dict(zip(MESH_AXES, (1, 2, 4), strict=True))
    sharding = sharding_of(mesh, EXPERTS, (3, 8, 2, 12, 5))
    assert sharding.spec == PartitionSpec(None, "expert", None, "tensor", None)
    assert sharding.shard_shape((3, 8, 2, 12, 5)) == (3, 4, 2, 3, 5)
    assert sharding_of(mesh, EXPERTS, (3, 8, 2, 12, 5), DECODE).shard_shape((3, 8, 2, 12, 5)) == (3, 1, 2, 12, 5)
    assert replicated(mesh).shard_shape((3, 5)) == (3, 5)
