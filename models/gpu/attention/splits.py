"""What splits of a context found, merged: one block of threads for each query and head, which reads what was written.

XLA would read every split that there could be, and needs several launches.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from moonshard.models.gpu.attention.tiles import LEAST, ROWS, Splits, keys_of_split, queries_of
from moonshard.models.gpu.tensor_cores import Interpret
from moonshard.sharding.arrays import Array, Int

AT_ONCE = 8  # splits whose loads are under way together


def merge_splits(
    splits: Splits,
    positions: Int[Array, "n t"],
    num_heads: int,
    keys_at_once: int,
    dtype: DTypeLike,
    interpret: Interpret,
) -> Splits:
    """One split of the queries' rows, normalised: zeros where no split has keys. Steps are of `keys_at_once` keys."""
    num_splits, n, _, rank = splits.mixed.shape
    num_rows = positions.shape[1] * num_heads
    assert splits.peak is not None  # there are several
    assert splits.total is not None

    def kernel(mixed: Any, peaks: Any, totals: Any, positions: Any, out: Any) -> None:
        row, sequence = jax.lax.axis_index("row"), jax.lax.axis_index("sequence")
        tile = jax.lax.div(row, jnp.int32(ROWS))
        each, end = keys_of_split(queries_of(tile, positions, sequence, num_heads), num_splits, keys_at_once)
        num_used = jax.lax.div(end + each - 1, jnp.maximum(each, 1))

        def step(index, carry):
            merged, peak, total = carry
            numbers = [index * AT_ONCE + number for number in range(AT_ONCE)]
            places = [(jnp.minimum(number, num_used - 1), sequence, row) for number in numbers]  # all written
            is_used = [number < num_used for number in numbers]
            own_peaks = [jnp.where(used, peaks[at], LEAST) for used, at in zip(is_used, places, strict=True)]
            values = [plgpu.load(mixed.at[at]) for at in places]
            higher = peak
            for own in own_peaks:
                higher = jnp.maximum(higher, own)
            decay = jnp.exp2(peak - higher)
            merged, total = merged * decay, total * decay
            for used, at, own, value in zip(is_used, places, own_peaks, values, strict=True):
                weight = jnp.where(used, jnp.exp2(own - higher), 0.0)
                merged, total = merged + value * weight, total + totals[at] * weight
            return merged, higher, total

        layout = plgpu.Layout.WG_STRIDED((rank,), vec_size=rank // 128)
        start = (plgpu.layout_cast(jnp.zeros((rank,), jnp.float32), layout), jnp.float32(LEAST), jnp.float32(0))
        merged, _, total = jax.lax.fori_loop(0, jax.lax.div(num_used + AT_ONCE - 1, jnp.int32(AT_ONCE)), step, start)
        out[0, sequence, row] = (merged * (1 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny))).astype(out.dtype)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((1, n, num_rows, rank), dtype),
        grid=(num_rows, n),
        grid_names=("row", "sequence"),
        kernel_name="merge_splits",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return Splits(call(splits.mixed, splits.peak, splits.total, positions))
