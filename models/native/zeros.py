"""Zeros that take no memory until something is written to them: a pool that is large, and empty for long.

XLA writes its zeros, and the kernel then has to give every page at once: 0.4 s for a GiB.
"""

from collections.abc import Sequence

import jax

from moonshard.models.native.library import target
from moonshard.sharding.arrays import Array


def zeros(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> Array:
    """As `jax.numpy.zeros`, to be called within jit. LibraryError without the library."""
    return jax.ffi.ffi_call(target("zeros"), jax.ShapeDtypeStruct(tuple(shape), dtype))()
