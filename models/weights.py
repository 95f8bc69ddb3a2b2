"""From declared parameters to arrays on a mesh: read from a checkpoint, or drawn at random.

Works on any pytree of `Param`, of any model. Each device asks for its own slice, and only the bytes of that slice are
read from the memory-mapped files. They are held once: a device that lives in the machine's memory keeps the array that
they were read into, and of the files nothing stays mapped that was read.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moonshard.models.spec import ModelError, Param
from moonshard.sharding.mesh import sharding_of
from moonshard.sharding.rules import PREFILL, Rules

Holding = Literal["native", "float32", "bf16"]  # how matrices lie in memory: see `load`
ALIGNMENT_BYTES = 64  # of arrays on CPU (xla/cpu_function_runtime.h: MinAlign)


@runtime_checkable
class TensorSource(Protocol):
    """What loading needs of a checkpoint."""

    def tensor(self, name: str) -> np.ndarray: ...

    def release(self, name: str) -> None:
        """Called once a device's part of a tensor was read: its memory is needed no longer."""
        ...


def is_param(leaf: Any) -> bool:
    return isinstance(leaf, Param)


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

    def leaf(param: Param) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(mesh, param.axes, param.shape, rules)
        computed = jnp.dtype(dtype)
        held = jnp.dtype(param.dtype or dtype) if source is None else held_dtype(param, source, computed, holding)
        return jax.ShapeDtypeStruct(param.shape, held, sharding=sharding)

    return jax.tree.map(leaf, params, is_leaf=is_param)


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
        holding: for matrices, which are nearly all of the bytes and which kernels widen as they read them: `native` as
            they are stored, unless that is wider than `dtype`; `float32` or `bf16` whatever is stored. None: `dtype`.
        progress: called with (leaves read, leaves in all).
        on_read: called with how long it took to read and convert each device's part of a leaf, before that is placed.

    Raises:
        ModelError: a tensor has another shape than declared. What `source` raises passes through.
    """
    leaves, tree = jax.tree.flatten(params, is_leaf=is_param)
    arrays, rooms = [], _Rooms()
    for index, param in enumerate(leaves):
        target = held_dtype(param, source, jnp.dtype(dtype), holding)
        sharding = sharding_of(mesh, param.axes, param.shape, rules)
        arrays.append(_load_leaf(param, source, target, sharding, rooms, on_read))
        progress(index + 1, len(leaves))
    return jax.tree.unflatten(tree, arrays)


def check_shapes(params: Any, source: TensorSource) -> None:
    """Opens every tensor and compares shapes, reading no values: a bad folder is refused before anything is allocated.

    Raises:
        ModelError: naming the first tensor whose shape is not the declared one.
    """
    for param in jax.tree.leaves(params, is_leaf=is_param):
        for _ in _views(param, source):
            pass


def held_dtype(param: Param, source: TensorSource, computed: np.dtype, holding: Holding | None) -> np.dtype:
    """What a parameter is held in. Of tensors that are stored differently and stacked, the widest decides."""
    if param.dtype is not None or holding is None or len(param.tensor_shape or param.shape[param.stacked :]) < 2:
        return jnp.dtype(param.dtype or computed)
    if holding != "native":
        return jnp.dtype(jnp.float32 if holding == "float32" else jnp.bfloat16)
    is_bf16 = all(view.dtype == jnp.bfloat16 for view in _views(param, source))
    return jnp.dtype(jnp.bfloat16) if is_bf16 else computed


def _load_leaf(
    param: Param,
    source: TensorSource,
    target: np.dtype,
    sharding: jax.sharding.Sharding,
    rooms: "_Rooms",
    on_read: Callable[[float], None],
) -> jax.Array:
    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        begun_s = time.perf_counter()
        index = index if index is not None else (slice(None),) * len(param.shape)
        leading, trailing = index[: param.stacked], index[param.stacked :]
        ranges = [range(*part.indices(size)) for part, size in zip(leading, param.shape, strict=False)]
        shape = [len(range(*part.indices(size))) for part, size in zip(index, param.shape, strict=True)]
        out = rooms.room(shape, target)
        for place in itertools.product(*(range(len(r)) for r in ranges)):
            where = tuple(r[i] for r, i in zip(ranges, place, strict=True))
            out[place] = _view(param, source, where)[trailing]
            source.release(param.source(*where))
        on_read(time.perf_counter() - begun_s)
        return out

    return jax.make_array_from_callback(param.shape, sharding, read)


def _views(param: Param, source: TensorSource) -> Iterator[np.ndarray]:
    """Every tensor of a parameter, of which no value is read."""
    for index in itertools.product(*(range(n) for n in param.shape[: param.stacked])):
        yield _view(param, source, index)


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


def _view(param: Param, source: TensorSource, index: Sequence[int]) -> np.ndarray:
    name = param.source(*index)
    tensor, wanted = source.tensor(name), param.tensor_shape or param.shape[param.stacked :]
    if tensor.shape != wanted:
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(wanted)}")
    return param.view(tensor)


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
