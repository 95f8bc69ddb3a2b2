"""Products on a warpgroup's tensor cores, in float32 sums.

jax's interpreter takes both sides of a product from shared memory only, and sums that begin at 0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moonshard.sharding.arrays import Array, Float

WIDE = plgpu.Layout.WGMMA  # how a warpgroup's registers hold a product
OF_ROWS = plgpu.Layout.WGMMA.reduce(1)  # and a value for each of its rows
MAX_COLUMNS = 256  # of one product

Interpret = plgpu.InterpretGPUParams | None


def product(left: Any, right: Any, shape: tuple[int, int]) -> Float[Array, "m n"]:
    """left · right, both in shared memory."""

    def run(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, left, right)
        return sums[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(sums: Float[Array, "m n"], left: Any, right: Any, interpret: Interpret) -> Float[Array, "m n"]:
    """sums + left · right, with the left side in registers or shared memory and the right in shared memory."""
    if interpret is not None:
        found = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # so that no copy overtakes a plain read; what tensor cores read, none does
        return sums + found
    start = plgpu.WGMMAAccumulatorRef.init(sums)
    found: Any = pl.run_state(lambda place: plgpu.wgmma(place, left, right))(start)
    return found


def store(place: Any, values: Array) -> None:
    """Into device memory, from registers that hold it as a product: jax 0.12 wants to be told that this is meant."""
    if hasattr(plgpu, "store"):
        plgpu.store(place, values, optimized=False)
    else:
        place[...] = values


def along_rows(values: Array, shape: tuple[int, int]) -> Array:
    """A row's value, [m], in all of its columns: [m, n]."""
    return jax.lax.broadcast_in_dim(values, shape, [0])


def await_all_free(free: Any, num_used: Any) -> None:
    """Waits until the last that lay in each of the used places was read: whoever waits for a barrier once always does.

    So the interpreter demands, which finds with it places that nobody frees.
    """
    for place in range(free.shape[0]):
        pl.when(num_used > place)(functools.partial(plgpu.barrier_wait, free.at[place]))
