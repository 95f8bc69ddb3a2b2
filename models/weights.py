"""From declared parameters to arrays on a mesh: read from a checkpoint, or drawn at random.

Works on any pytree of `Param`, of any model. Each device asks for its own slice, and only the bytes of that slice are
read from the memory-mapped files. They are held once: a device that lives in the machine's memory keeps the array that
they were read into, and of the files nothing stays mapped that was read.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moonshard.models.formats import stored
from moonshard.models.formats.format import Format
from moonshard.models.formats.holding import Holding, held, matrix_of
from moonshard.models.formats.layout import Layout
from moonshard.models.formats.quantised import Quantised
from moonshard.models.formats.stored import Reader, TensorSource, format_of
from moonshard.models.spec import Param
from moonshard.sharding.mesh import sharding_of
from moonshard.sharding.rules import PREFILL, MeshError, Rules, shard_shape, spec

ALIGNMENT_BYTES = 64  # of arrays on CPU (xla/cpu_function_runtime.h: MinAlign)
Read = Callable[[str, tuple[slice, ...]], np.ndarray]  # of one tensor of a leaf, the part that a device has


def is_param(leaf: Any) -> bool:
    return isinstance(leaf, Param)


def tensors_of(params: Any) -> set[str]:
    """The names of all tensors that parameters are read from, `.weight` whatever they are stored in."""
    return {name for param in jax.tree.leaves(params, is_leaf=is_param) for name in param.tensors()}


def abstract(
    params: Any,
    dtype: str,
    mesh: Mesh,
    rules: Rules = PREFILL,
    *,
    source: TensorSource | None = None,
    holding: Holding | None = None,
) -> Any:
    """The tree as shapes, dtypes and shardings: enough to lower a program without weights.

    As `load` would give it from `source`; without one all is in `dtype`.
    """
    computed = jnp.dtype(dtype)

    def array(param: Param, shape: tuple[int, ...], held_in: np.dtype) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(mesh, param.axes, param.shape, rules)
        return jax.ShapeDtypeStruct(shape, held_in, sharding=sharding)

    def leaf(param: Param) -> Any:
        if source is None:
            return array(param, param.shape, jnp.dtype(param.dtype or dtype))
        own = held(param, source, computed, holding)
        if not isinstance(own, Format):
            return array(param, param.shape, own)
        layout, leading = layout_of(param, own, mesh, rules, source), param.shape[: param.stacked]
        values = array(param, (*leading, *layout.values_shape), own.values.dtype)
        return _quantised(values, array(param, (*leading, *layout.scales_shape), own.scales.dtype), layout)

    return jax.tree.map(leaf, params, is_leaf=is_param)


def _quantised(values: Any, scales: Any, layout: Layout) -> Quantised[Any]:
    return Quantised(values, scales, layout.format.name, layout.block, layout.shape[-1])


def load(
    params: Any,
    source: TensorSource,
    dtype: str,
    mesh: Mesh,
    rules: Rules = PREFILL,
    *,
    holding: Holding | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_read: Callable[[float], None] = lambda seconds: None,
) -> Any:
    """Reads every parameter onto its devices, converted to `dtype`, which is what is computed in.

    Args:
        holding: see `formats.holding`. What is quantised now, or widened, each device makes of whole tensors.
        progress: called with (leaves read, leaves in all).
        on_read: called with how long it took to read and convert each device's part of a leaf, before that is placed.

    Raises:
        ModelError: a tensor has another shape or type than declared, or a value or scale that cannot be served.
        MeshError: the mesh would cut an item of several codes. What `source` raises passes through.
    """
    leaves, tree = jax.tree.flatten(params, is_leaf=is_param)
    arrays, loading = [], _Loading(Reader(source), on_read)
    for index, param in enumerate(leaves):
        sharding = sharding_of(mesh, param.axes, param.shape, rules)
        target = held(param, source, jnp.dtype(dtype), holding)
        if isinstance(target, Format):
            arrays.append(loading.quantised(param, layout_of(param, target, mesh, rules, source), sharding))
        else:
            arrays.append(loading.array(param, target, sharding))
        progress(index + 1, len(leaves))
    return jax.tree.unflatten(tree, arrays)


def check_shapes(params: Any, source: TensorSource) -> None:
    """Opens every tensor and compares shapes, reading no values: a bad folder is refused before anything is allocated.

    Raises:
        ModelError: naming the first tensor whose shape or type is not the declared one.
    """
    for param in jax.tree.leaves(params, is_leaf=is_param):
        is_matrix = len(param.whole_tensor) > 1
        for name in param.tensors():
            format = format_of(source, name) if is_matrix else None
            if format is None:
                stored.plain(source, name, param.whole_tensor)
            else:
                stored.parts(source, name, matrix_of(param), format)


def layout_of(param: Param, format: Format, mesh: Mesh, rules: Rules, source: TensorSource) -> Layout:
    """How a leaf that is held in a format lies on a mesh. MeshError where a device would have a part of an item."""
    whole = param.shape[param.stacked :]
    local = shard_shape(param.axes, param.shape, mesh.shape, rules)[param.stacked :]
    num_parts = tuple(size // own for size, own in zip(whole, local, strict=True))
    found = Layout.of(format, matrix_of(param), param.view, num_parts)
    if found is not None:
        return found
    cut_by = " x ".join(f"mesh.{axis}" for axis in spec(param.axes, param.shape, mesh.shape, rules)[-1])
    name = next(param.tensors())
    where = source.where(next(own for own in (stored.part_name(name, format.values), name) if source.has(own)))
    cuts = f"cuts the model's {param.axes[-1]} dimension {whole[-1]} into parts of {local[-1]}"
    words = f"{format.codes_per_item} values that are stored as one number"
    raise MeshError(f"{cut_by} = {num_parts[-1]} {cuts}, which cut through {words}: {where}")


class _Loading:
    """Reads leaves, one after the other, into memory that becomes the devices'."""

    def __init__(self, reader: Reader, on_read: Callable[[float], None]):
        self._reader = reader
        self._on_read = on_read
        self._rooms = _Rooms()

    def array(self, param: Param, target: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
        """A leaf whose values are held as they are."""

        def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
            return param.viewed(self._reader.array(name, param.whole_tensor))[index]

        return self._leaf(param, param.shape, target, sharding, read, self._reader.release)

    def quantised(self, param: Param, layout: Layout, sharding: jax.sharding.Sharding) -> Quantised[jax.Array]:
        """A leaf that is held in a format."""
        reader, matrix, format = self._reader, layout.matrix, layout.format

        def values(name: str, index: tuple[slice, ...]) -> np.ndarray:
            found = layout.values(reader.values(name, matrix, format), index)
            reader.check_values(name, format, found)
            return found

        def scales(name: str, index: tuple[slice, ...]) -> np.ndarray:
            found = layout.scales(reader.scales(name, matrix, format), index)
            reader.check_scales(name, format, found)
            return found

        leading = param.shape[: param.stacked]
        return _quantised(
            self._leaf(param, (*leading, *layout.values_shape), format.values.dtype, sharding, values, reader.release),
            self._leaf(param, (*leading, *layout.scales_shape), format.scales.dtype, sharding, scales, reader.release),
            layout,
        )

    def _leaf(
        self,
        param: Param,
        shape: tuple[int, ...],
        target: np.dtype,
        sharding: jax.sharding.Sharding,
        read_one: Read,
        release: Callable[[str], None],
    ) -> jax.Array:
        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            begun_s = time.perf_counter()
            index = index if index is not None else (slice(None),) * len(shape)
            leading, trailing = index[: param.stacked], index[param.stacked :]
            ranges = [range(*part.indices(size)) for part, size in zip(leading, shape, strict=False)]
            out = self._rooms.room(
                [len(range(*own.indices(size))) for own, size in zip(index, shape, strict=True)], target
            )
            for place in itertools.product(*(range(len(r)) for r in ranges)):
                name = param.source(*(r[i] for r, i in zip(ranges, place, strict=True)))
                out[place] = read_one(name, trailing)
                release(name)
            self._on_read(time.perf_counter() - begun_s)
            return out

        return jax.make_array_from_callback(shape, sharding, read)


class _Rooms:
    """Where arrays are read into: they begin where XLA's do, and on CPU become XLA's as they are, where any other is
    copied.

    Small ones lie behind each other in slabs that are large enough for numpy to ask for large pages (from 4 MiB on):
    of pages of 4 KiB a processor reads weights at half the rate. What of a slab nothing is read into takes no memory.
    """

    SLAB_BYTES = 64 << 20

    def __init__(self) -> None:
        self._slab, self._used_bytes = np.empty(0, np.uint8), 0

    def room(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An unfilled array."""
        size = math.prod(shape) * dtype.itemsize
        if self._used_bytes + size > len(self._slab):
            slab = np.empty(max(size, self.SLAB_BYTES) + ALIGNMENT_BYTES, np.uint8)
            begin = -slab.__array_interface__["data"][0] % ALIGNMENT_BYTES
            self._slab, self._used_bytes = slab[begin:], 0
        begin = self._used_bytes
        self._used_bytes = begin + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._slab[begin : begin + size].view(dtype).reshape(shape)


def initialise(params: Any, seed: int, dtype: str, mesh: Mesh, rules: Rules = PREFILL) -> Any:
    """Random weights with the declared shapes: fan-in scaled normals, and the declared constants."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_param)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(param: Param, key: jax.Array) -> jax.Array:
        target = jnp.dtype(param.dtype or dtype)
        sharding = sharding_of(mesh, param.axes, param.shape, rules)
        if param.initial is None:
            return _normals(param.shape, target, sharding)(key)
        constant = np.full(param.shape, param.initial, target)
        return jax.make_array_from_callback(param.shape, sharding, constant.__getitem__)

    return jax.tree.unflatten(tree, [draw(p, k) for p, k in zip(leaves, keys, strict=True)])


@functools.cache
def _normals(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array], jax.Array]:
    """Draws a parameter of this shape from a key. One program for all that are alike, in every model of a process."""

    def value(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)

    return jax.jit(value, out_shardings=sharding)
