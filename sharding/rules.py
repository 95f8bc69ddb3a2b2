"""Logical axes to mesh axes: one table per role, and nothing else decides where a slice lives.

A mesh axis of size 1 costs nothing, so the same table serves one device and many.
Source: the logical-axis rules of T5X and MaxText.
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moonshard.sharding.shape import MeshShape

MESH_AXES = ("data", "expert", "tensor")
Rules = Mapping[str, str | None]

BOTH: Rules = MappingProxyType(
    {
        "layers": None,
        "embed": None,
        "heads": "tensor",
        "kv_lora": None,
        "experts": "expert",
        "ffw": "tensor",
        "vocab": "tensor",
    }
)


class MeshError(ValueError):
    """A mesh that this machine or this model cannot have; the message begins with `mesh` and names the axis."""


def build_mesh(shape: MeshShape) -> Mesh:
    """The first `shape.num_devices` devices as a mesh with axes `data, expert, tensor`.

    Nothing is mapped to `data` yet: its devices repeat one another's work.

    Raises:
        MeshError: more devices are asked for than there are, or an axis is not served yet.
    """
    if shape.pipe != 1:
        raise MeshError(f"mesh.pipe = {shape.pipe}: only pipe = 1 is served in this version")
    devices = jax.devices()
    if shape.num_devices > len(devices):
        raise MeshError(f"mesh ({shape}) needs {shape.num_devices} devices, {devices[0].platform} has {len(devices)}")
    return jax.make_mesh(
        (shape.data, shape.expert, shape.tensor), MESH_AXES, devices=devices[: shape.num_devices], axis_types=_AUTO
    )


_AUTO = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)


def sharding_of(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules = BOTH) -> NamedSharding:
    """Where a leaf with these logical axes lies.

    Raises:
        MeshError: a dimension does not divide by the mesh axis it is mapped to.
    """
    spec = tuple(rules[axis] if axis is not None else None for axis in axes)
    for dimension, axis, mesh_axis in zip(shape, axes, spec, strict=True):
        if mesh_axis is not None and dimension % mesh.shape[mesh_axis]:
            raise MeshError(
                f"mesh.{mesh_axis} = {mesh.shape[mesh_axis]} does not divide the model's {axis} dimension {dimension}"
            )
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
