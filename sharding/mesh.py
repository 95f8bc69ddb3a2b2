"""Device meshes, and where an array lies on one: the tables of `rules` in jax's words."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moonshard.sharding.rules import MESH_AXES, PREFILL, MeshError, Rules, spec
from moonshard.sharding.shape import MeshShape


def build_mesh(shape: MeshShape, stage: int = 0) -> Mesh:
    """The mesh of one stage, with axes `data, expert, tensor`: stages take their devices one after another.

    Of several processes they do so from the end: the last stage, which draws the tokens, is in the first process.

    Raises:
        MeshError: all stages together ask for more devices than there are.
    """
    devices = mesh_devices(shape.num_devices)
    if shape.num_devices > len(devices):
        raise MeshError(f"mesh ({shape}) needs {shape.num_devices} devices, {devices[0].platform} has {len(devices)}")
    per_stage = shape.num_devices // shape.pipe
    place = stage if jax.process_count() == 1 else shape.pipe - 1 - stage
    own = devices[place * per_stage : (place + 1) * per_stage]
    return jax.make_mesh((shape.data, shape.expert, shape.tensor), MESH_AXES, devices=own, axis_types=_AUTO)


def mesh_devices(num_devices: int) -> list[Any]:
    """Those of a mesh of so many are the first: of several processes each gives as many of its own.

    MeshError where one of several has too few.
    """
    num_processes = jax.process_count()
    if num_processes == 1:
        return jax.devices()[:num_devices]
    of_each = -(-num_devices // num_processes)
    found = [_of_process(index) for index in range(num_processes)]
    for index, own in enumerate(found):
        if len(own) < of_each:
            raise MeshError(f"mesh needs {of_each} devices of each process, member {index} has {len(own)}")
    return [device for own in found for device in own[:of_each]]


def _of_process(index: int) -> list[Any]:
    return [device for device in jax.devices() if device.process_index == index]


BY_PARTITION = PartitionSpec(("data", "expert"))  # of what every KV partition has its own
_AUTO = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)


def partition_spec(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], rules: Rules) -> PartitionSpec:
    """The mesh axes that cut each dimension, for jax. MeshError where a dimension does not divide.

    Mesh axes of size 1 are not named, so that tables that cut alike give the same program, compiled once for both.
    """
    cuts = spec(axes, shape, mesh.shape, rules)
    return PartitionSpec(*(tuple(axis for axis in cut_by if mesh.shape[axis] > 1) or None for cut_by in cuts))


def sharding_of(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], rules: Rules = PREFILL) -> NamedSharding:
    """Where a leaf with these logical axes lies. MeshError where a dimension does not divide."""
    return NamedSharding(mesh, partition_spec(mesh, axes, shape, rules))


def placed(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays that every process has whole, on the devices; each process gives its own devices their parts."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.jit(lambda whole: whole, out_shardings=jax.tree.map(lambda _: sharding, tree))(tree)


def processes_of(mesh: Mesh) -> set[int]:
    """Whose its devices are."""
    return {device.process_index for device in mesh.devices.flat}


def is_here(mesh: Mesh) -> bool:
    """Whether some of its devices are this process's."""
    return jax.process_index() in processes_of(mesh)


def spans_processes(mesh: Mesh) -> bool:
    """Whether some of its devices are another process's."""
    return processes_of(mesh) != {jax.process_index()}


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
