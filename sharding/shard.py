"""What a device must know of the mesh it computes in: which axes cut what, and how partial results come together.

Programs are written for one device and run on all of them under `shard_map`, so every collective stands in the source
where it happens. On one device each of these is the identity and compiles to nothing.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from moonshard.sharding.arrays import Array, Int
from moonshard.sharding.rules import PREFILL, MeshAxis, Rules
from moonshard.sharding.shape import MeshShape

HEADS = 2  # the dimension of queries [n, t, heads, f]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A device of a mesh under a table of rules. The default is a device on its own."""

    mesh: MeshShape = field(default_factory=MeshShape)
    rules: Rules = PREFILL

    def axes(self, logical: str) -> tuple[MeshAxis, ...]:
        """The mesh axes that cut a logical axis here; those of size 1 do not."""
        return tuple(axis for axis in self.rules.of(logical) if getattr(self.mesh, axis) > 1)

    def num_parts(self, logical: str) -> int:
        """Into how many parts a logical axis is cut."""
        return math.prod(getattr(self.mesh, axis) for axis in self.axes(logical))

    def part(self, logical: str) -> Int[Array, ""]:
        """Which part of a logical axis this device holds."""
        axes = self.axes(logical)
        return jax.lax.axis_index(axes) if axes else jnp.int32(0)

    def partition(self) -> Int[Array, ""]:
        """Which KV partition this device belongs to."""
        axes = tuple(axis for axis in ("data", "expert") if getattr(self.mesh, axis) > 1)
        return jax.lax.axis_index(axes) if axes else jnp.int32(0)

    def sum(self, x: Array, axes: tuple[MeshAxis, ...]) -> Array:
        """Adds up the partial sums of the devices along these axes."""
        return jax.lax.psum(x, axes) if axes else x

    def max(self, x: Array, axes: tuple[MeshAxis, ...]) -> Array:
        """The largest of the devices' values along these axes."""
        return jax.lax.pmax(x, axes) if axes else x

    def gather_heads(self, x: Array) -> Array:
        """[n, t, own heads, f] of each device to [n, t, heads, f] on all, where heads are cut."""
        axes = self.axes("heads")
        return jax.lax.all_gather(x, axes, axis=HEADS, tiled=True) if axes else x

    def sum_own_heads(self, x: Array) -> Array:
        """[n, t, heads, f], partial sums of the devices along `kv_tokens`, to this device's heads of the sum."""
        axes = self.axes("kv_tokens")
        if self.axes("heads") != axes:
            return self.sum(x, axes)
        return jax.lax.psum_scatter(x, axes, scatter_dimension=HEADS, tiled=True)

    def gather(self, x: Array, logical: str) -> Array:
        """Puts together the parts of the last dimension, which is cut as `logical` is."""
        axes = self.axes(logical)
        return jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True) if axes else x


ALONE = Shard()
