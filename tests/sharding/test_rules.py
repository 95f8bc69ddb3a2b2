"""A mesh or a model that does not fit is refused by the name of its axis; what fits lies where the table says."""

import jax
import pytest
from jax.sharding import PartitionSpec

from moonshard.sharding.rules import BOTH, MESH_AXES, MeshError, build_mesh, replicated, sharding_of
from moonshard.sharding.shape import MeshShape

pytestmark = pytest.mark.xdist_group("jax")


def test_stages_are_not_served_yet_and_refused_by_name():
    with pytest.raises(MeshError, match=r"mesh\.pipe = 2"):
        build_mesh(MeshShape(pipe=2))


def test_a_mesh_larger_than_the_machine_is_refused_with_both_numbers():
    available = len(jax.devices())
    with pytest.raises(MeshError, match=rf"expert={available} tensor=2.* needs {2 * available} devices, cpu has"):
        build_mesh(MeshShape(expert=available, tensor=2))


@pytest.mark.parametrize(
    ("axis", "logical", "dimension"), [("tensor", "heads", 6), ("expert", "experts", 7), ("tensor", "vocab", 10)]
)
def test_a_dimension_that_does_not_divide_is_refused_with_axis_and_dimension(axis, logical, dimension):
    shape = MeshShape(expert=2, tensor=4)
    mesh, size = build_mesh(shape), getattr(shape, axis)
    message = rf"mesh\.{axis} = {size} does not divide the model's {logical} dimension {dimension}"
    with pytest.raises(MeshError, match=message):
        sharding_of(mesh, ("layers", logical, None), (3, dimension, 4))


def test_a_leaf_is_cut_along_the_axes_of_the_table_and_whole_elsewhere():
    mesh = build_mesh(MeshShape(expert=2, tensor=4))
    assert dict(mesh.shape) == dict(zip(MESH_AXES, (1, 2, 4), strict=True))
    sharding = sharding_of(mesh, ("layers", "experts", None, "ffw", "embed"), (3, 8, 2, 12, 5))
    assert sharding.spec == PartitionSpec(None, "expert", None, "tensor", None)
    assert sharding.shard_shape((3, 8, 2, 12, 5)) == (3, 4, 2, 3, 5)
    assert replicated(mesh).shard_shape((3, 5)) == (3, 5)


def test_the_table_may_be_another():
    mesh = build_mesh(MeshShape(expert=2, tensor=2))
    flipped = {**BOTH, "experts": "tensor", "ffw": None}
    assert sharding_of(mesh, ("experts", "ffw"), (4, 3), flipped).shard_shape((4, 3)) == (2, 3)
