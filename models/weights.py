"""From declared parameters to arrays on a mesh: read from a checkpoint, or drawn at random.

Works on any pytree of `Param`, of any model. Every tensor is read once from the memory-mapped files, and each device
has its own slice of it; a matrix' scales are read with its codes. They are held once: a device that lives in the
machine's memory keeps the array that they were read into, and of the files nothing stays mapped that was read.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
Index = tuple[slice, ...]


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
        on_read: called with how long it took to read and convert each leaf, before it is placed.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Array:
    """One array of a leaf: what becomes of it, and how a tensor's part of it is cut for a device."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    cut: Callable[[str, np.ndarray, Index], np.ndarray]  # by the tensor's name


class _Loading:
    """Reads leaves, one after the other, into memory that becomes the devices'."""

    def __init__(self, reader: Reader, on_read: Callable[[float], None]):
        self._reader = reader
        self._on_read = on_read
        self._rooms = _Rooms()

    def array(self, param: Param, target: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
        """A leaf whose values are held as they are."""

        def read(name: str) -> tuple[np.ndarray]:
            return (param.viewed(self._reader.array(name, param.whole_tensor)),)

        whole = _Array(shape=param.shape, dtype=target, sharding=sharding, cut=lambda name, found, index: found[index])
        return self._filled(param, read, (whole,))[0]

    def quantised(self, param: Param, layout: Layout, sharding: jax.sharding.Sharding) -> Quantised[jax.Array]:
        """A leaf that is held in a format."""
        reader, matrix, format = self._reader, layout.matrix, layout.format

        def values(name: str, found: np.ndarray, index: Index) -> np.ndarray:
            own = layout.values(found, index)
            reader.check_values(name, format, own)
            return own

        def scales(name: str, found: np.ndarray, index: Index) -> np.ndarray:
            own = layout.scales(found, index)
            reader.check_scales(name, format, own)
            return own

        leading = param.shape[: param.stacked]
        arrays = (
            _Array(shape=(*leading, *layout.values_shape), dtype=format.values.dtype, sharding=sharding, cut=values),
            _Array(shape=(*leading, *layout.scales_shape), dtype=format.scales.dtype, sharding=sharding, cut=scales),
        )
        of_values, of_scales = self._filled(param, lambda name: reader.coded(name, matrix, format), arrays)
        return _quantised(of_values, of_scales, layout)

    def _filled(
        self, param: Param, read: Callable[[str], Sequence[np.ndarray]], arrays: Sequence[_Array]
    ) -> list[jax.Array]:
        """Every tensor is read once, for all devices. The next one comes in while one is copied."""
        begun_s = time.perf_counter()
        parts = [self._parts_of(array, param.stacked) for array in arrays]
        places = list(itertools.product(*map(range, param.shape[: param.stacked])))
        names = [param.source(*place) for place in places]
        self._reader.expect(names[0])
        for number, (name, place) in enumerate(zip(names, places, strict=True)):
            if number + 1 < len(names):
                self._reader.expect(names[number + 1])
            for array, own, found in zip(arrays, parts, read(name), strict=True):
                for part in own.values():
                    if (at := part.at(place)) is not None:
                        part.memory[at] = array.cut(name, found, part.trailing)
            self._reader.release(name)
        self._on_read(time.perf_counter() - begun_s)
        return [
            jax.make_array_from_callback(array.shape, array.sharding, lambda index, own=own: own[index].memory)
            for array, own in zip(arrays, parts, strict=True)
        ]

    def _parts_of(self, array: _Array, num_leading: int) -> "dict[Index | None, _Part]":
        """What devices have of an array: those that have the same share the memory that it is read into."""
        found = dict[Index | None, _Part]()
        for index in array.sharding.addressable_devices_indices_map(array.shape).values():
            if index in found:
                continue
            whole = (slice(None),) * len(array.shape) if index is None else index
            ranges = [range(*own.indices(size)) for own, size in zip(whole, array.shape, strict=True)]
            memory = self._rooms.room([len(own) for own in ranges], array.dtype)
            found[index] = _Part(leading=tuple(ranges[:num_leading]), trailing=whole[num_leading:], memory=memory)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A part of an array, in the memory that becomes a device's. `leading`: of the dimensions that are stacked."""

    leading: tuple[range, ...]
    trailing: Index
    memory: np.ndarray

    def at(self, place: tuple[int, ...]) -> tuple[int, ...] | None:
        """Where in `memory` a tensor lies that is at this place of the whole; None: it is not among them."""
        if not all(own in range_ for own, range_ in zip(place, self.leading, strict=True)):
            return None
        return tuple(own - range_.start for own, range_ in zip(place, self.leading, strict=True))


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
