"""What a device must know of the mesh it computes in: which axes cut what, and how partial results come together.

Programs are written for one device and run on all of them under `shard_map`, so every collective stands in the text
where it happens and is counted there. On one device each of these is the identity and compiles to nothing.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from moonshard.sharding.arrays import Array, Int
from moonshard.sharding.rules import PREFILL, MeshAxis, Rules
from moonshard.sharding.shape import MeshShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A device of a mesh, under a table of rules. The default is a device on its own."""

    mesh: MeshShape = field(default_factory=MeshShape)
    rules: Rules = PREFILL

    def axes(self, logical: str) -> tuple[MeshAxis, ...]:
        """The mesh axes that really cut a logical axis here."""
        return tuple(axis for axis in self.rules.of(logical) if getattr(self.mesh, axis) > 1)

    def num_parts(self, logical: str) -> int:
        return math.prod(getattr(self.mesh, axis) for axis in self.axes(logical))

    def part(self, logical: str) -> Int[Array, ""]:
        """Which part of a logical axis this device holds."""
        axes = self.axes(logical)
        return jax.lax.axis_index(axes) if axes else jnp.int32(0)

    def sum(self, x: Array, axes: tuple[MeshAxis, ...]) -> Array:
        """Partial sums of the devices along these axes, added up."""
        return jax.lax.psum(x, axes) if axes else x

    def gather(self, x: Array, logical: str) -> Array:
        """The parts of the last axis, which is cut as `logical` is, put together."""
        axes = self.axes(logical)
        return jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True) if axes else x


ALONE = Place()
