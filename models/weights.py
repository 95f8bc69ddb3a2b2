"""From declared parameters to arrays on a mesh: read from a checkpoint, or drawn at random.

Works on any pytree of `Param`, of any model. Every tensor is read once from the memory-mapped files, an expert's once
for each of its places, and each device has its own slice of it; a matrix' scales are read with its codes. They are held
once: a device that lives in the machine's memory keeps the array that they were read into, and of the files nothing
stays mapped that was read.
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
        holding: see `formats.holding`. What is quantised now, or widened, is made of a whole tensor once.
        progress: called with (tensors read, tensors in all). What it raises ends the reading.
        on_read: called with how long it took to read and convert each leaf, or several of the same tensors, before they
            are placed.

    Raises:
        ModelError: a tensor has another shape or type than declared, or a value or scale that cannot be served.
        MeshError: the mesh would cut an item of several codes. What `source` raises passes through.
    """
    leaves, tree = jax.tree.flatten(params, is_leaf=is_param)
    groups, found = _by_tensors(leaves), dict[int, Any]()
    total = sum(map(len, groups))
    loading = _Loading(Reader(source), lambda done: progress(done, total))
    for own in groups.values():
        begun_s = time.perf_counter()
        unread = []
        for index in own:
            param = leaves[index]
            sharding = sharding_of(mesh, param.axes, param.shape, rules)
            held_in = held(param, source, jnp.dtype(dtype), holding)
            if isinstance(held_in, Format):
                held_in = layout_of(param, held_in, mesh, rules, source)
            unread.append(loading.leaf(param, held_in, sharding))
        loading.fill(unread)
        on_read(time.perf_counter() - begun_s)
        found |= {index: leaf.placed() for index, leaf in zip(own, unread, strict=True)}
    return jax.tree.unflatten(tree, [found[index] for index in range(len(leaves))])


def _by_tensors(leaves: Sequence[Param]) -> dict[tuple[str, ...], list[int]]:
    """The leaves that are parts of the same tensors, by their places."""
    found = dict[tuple[str, ...], list[int]]()
    for index, param in enumerate(leaves):
        found.setdefault(tuple(param.tensors()), []).append(index)
    return found


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

    def __init__(self, reader: Reader, progress: Callable[[int], None]):
        self._reader = reader
        self._progress = progress  # with the number of tensors that were read
        self._num_read = 0
        self._rooms = _Rooms()

    def leaf(self, param: Param, held_in: np.dtype | Layout, sharding: jax.sharding.Sharding) -> "_Leaf":
        """With memory for its values, in which there is nothing yet."""
        if not isinstance(held_in, Layout):
            return _Leaf(param, None, [self._array(param, param.shape, held_in, sharding)])
        leading, format = param.shape[: param.stacked], held_in.format
        values = self._array(param, (*leading, *held_in.values_shape), format.values.dtype, sharding)
        scales = self._array(param, (*leading, *held_in.scales_shape), format.scales.dtype, sharding)
        return _Leaf(param, held_in, [values, scales])

    def fill(self, leaves: Sequence["_Leaf"]) -> None:
        """Reads what these are parts of. The next tensor comes in while one is copied."""
        param = leaves[0].param
        places = list(itertools.product(*map(range, param.shape[: param.stacked])))
        wanted = [(param.source(*place), place) for place in places if any(leaf.is_at(place) for leaf in leaves)]
        for name, _ in wanted[:1]:
            self._reader.expect(name)
        for (name, place), later in itertools.zip_longest(wanted, wanted[1:]):
            if later is not None:
                self._reader.expect(later[0])
            made = dict[Format | None, tuple[np.ndarray, ...]]()  # of this tensor, whichever leaf needs it first
            for leaf in leaves:
                leaf.take(self._reader, name, place, made)
            self._reader.release(name)
            self._tell(1)
        self._tell(len(places) - len(wanted))

    def _tell(self, num_read: int) -> None:
        if num_read:
            self._num_read += num_read
            self._progress(self._num_read)

    def _array(
        self, param: Param, shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding
    ) -> "_Array":
        """Devices that have the same part of it share the memory that it is read into."""
        parts = dict[Index | None, _Part]()
        for index in sharding.addressable_devices_indices_map(shape).values():
            if index in parts:
                continue
            whole = (slice(None),) * len(shape) if index is None else index
            ranges = [range(*own.indices(size)) for own, size in zip(whole, shape, strict=True)]
            memory = self._rooms.room([len(own) for own in ranges], dtype)
            leading, trailing = tuple(ranges[: param.stacked]), whole[param.stacked :]
            parts[index] = _Part(leading=leading, trailing=trailing, memory=memory)
        return _Array(shape=shape, sharding=sharding, parts=parts)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Array:
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: dict[Index | None, _Part]  # by what a device has of it

    def take(self, place: tuple[int, ...], cut: Callable[[Index], np.ndarray]) -> None:
        """Puts a tensor into every part that has some of it."""
        for part in self.parts.values():
            if (at := part.at(place)) is not None:
                part.memory[at] = cut(part.trailing)

    def placed(self) -> jax.Array:
        return jax.make_array_from_callback(self.shape, self.sharding, lambda index: self.parts[index].memory)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What becomes a leaf: of values as they are one array, in a layout of a format codes and scales."""

    param: Param
    layout: Layout | None
    arrays: list[_Array]

    def is_at(self, place: tuple[int, ...]) -> bool:
        """Whether a device here has some of the tensor at this place."""
        return any(part.at(place) is not None for array in self.arrays for part in array.parts.values())

    def take(
        self,
        reader: Reader,
        name: str,
        place: tuple[int, ...],
        made: dict[Format | None, tuple[np.ndarray, ...]],
    ) -> None:
        """`made`: what was made of the tensor for other leaves."""
        param, layout = self.param, self.layout
        if layout is None:
            if None not in made:
                made[None] = (reader.array(name, param.whole_tensor),)
            whole = param.viewed(made[None][0])
            return self.arrays[0].take(place, lambda index: whole[index])
        if layout.format not in made:
            made[layout.format] = reader.coded(name, layout.matrix, layout.format)
        codes, factors = made[layout.format]

        def values(index: Index) -> np.ndarray:
            own = layout.values(codes, index)
            reader.check_values(name, layout.format, own)
            return own

        def scales(index: Index) -> np.ndarray:
            own = layout.scales(factors, index)
            reader.check_scales(name, layout.format, own)
            return own

        self.arrays[0].take(place, values)
        self.arrays[1].take(place, scales)

    def placed(self) -> Any:
        first, *scales = (array.placed() for array in self.arrays)
        return first if self.layout is None else _quantised(first, scales[0], self.layout)


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
