"""Products of blocks of rows with weights in bfloat16, read where they lie in the stack and multiplied as they are.

Of the two warpgroups that multiply, each has half of the rows where there are 128, else all of them with half of the
columns. Rows are multiplied in 64s; of a smaller block, only its own are loaded and stored.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moonshard.models.gpu.experts.tiles import (
    LEAST_ROWS,
    MAX_ROWS,
    NUM_COMPUTING,
    NUM_PIECES,
    Blocks,
    Cut,
    Form,
    Piece,
    Sizes,
    Tile,
    launch,
    place_of,
)
from moonshard.models.gpu.tensor_cores import Interpret
from moonshard.sharding.arrays import Array, Float

CUT = Cut(columns=64, depth=128, num_stages=4)
CUT_OF_MANY_ROWS = Cut(columns=128, depth=64, num_stages=3)


def grouped_product(
    rows: Float[Array, "rows f"],
    weights: Float[Array, "l e p o d"],
    blocks: Blocks,
    *,
    cut: Cut | None = None,
    num_processors: int | None = None,
    kernel_name: str = "experts_down",
    interpret: Interpret = None,
) -> Float[Array, "rows o"]:
    """Every used block's rows times its expert's weights; rows of unused blocks are left unwritten.

    Args:
        rows: of which the first d features are multiplied.
        weights: p 2: gate and up, and the result is silu(gate) * up. p 1: the result is the product.
        cut: None: as suits the rows.
        num_processors: that work off the products in turn; None: all of the card.
        kernel_name: of the result of p 1, as profiles have it.
    """
    _, num_experts, num_matrices, num_own, depth = weights.shape
    held = max(blocks.num_rows, LEAST_ROWS)
    cut = cut or (CUT if held == LEAST_ROWS else CUT_OF_MANY_ROWS)
    sizes = Sizes(
        num_rows=blocks.num_rows,
        num_experts=num_experts,
        num_matrices=num_matrices,
        num_own=num_own,
        depth=depth,
        cut=cut,
    )
    own = {"weight_places": plgpu.SMEM((cut.num_stages, NUM_PIECES, cut.columns, cut.depth), rows.dtype)}
    return launch(
        Form(_copies, _multiply, _put),
        sizes,
        rows,
        (weights.reshape(-1, depth),),
        blocks,
        sizes.places(held, own, NUM_PIECES + 1, rows.dtype),
        num_processors=num_processors,
        kernel_name="experts_gate_up" if num_matrices == 2 else kernel_name,
        interpret=interpret,
    )


def _copies(weights: tuple[Any, ...], number: int, piece: Piece, index: Any, place: Any, places: dict[str, Any]) -> Any:
    _, _, columns, depth = places["weight_places"].shape
    source = weights[0].at[pl.ds(piece.row, columns), pl.ds(index * depth, depth)]
    return [(source, places["weight_places"].at[place, number])]


class _Share(NamedTuple):
    """What one of the computing warpgroups has of a product."""

    rows: Any
    num_columns: int  # of each piece
    first_column: Any


def _share(places: dict[str, Any]) -> _Share:
    warpgroup, columns = jax.lax.axis_index("warpgroup"), places["weight_places"].shape[2]
    if places["row_places"].shape[1] == MAX_ROWS:
        return _Share(pl.ds(warpgroup * LEAST_ROWS, LEAST_ROWS), columns, 0)
    return _Share(pl.ds(0, LEAST_ROWS), columns // NUM_COMPUTING, warpgroup * (columns // NUM_COMPUTING))


def _multiply(
    weights: tuple[Any, ...], tile: Tile, places: dict[str, Any], done: Any, sizes: Sizes
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's share of both pieces; `done` steps were multiplied before."""
    del weights, tile  # all was loaded
    share = _share(places)

    def free(step: Any) -> None:
        plgpu.barrier_arrive(places["free"].at[place_of(step, sizes)])

    def run(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
        @pl.loop(0, sizes.num_steps)
        def _(index):
            step = done + index
            place = place_of(step, sizes)
            plgpu.barrier_wait(places["loaded"].at[place])
            rows = places["row_places"].at[place, share.rows]
            for piece, sums in enumerate((one, other)):
                weights = places["weight_places"].at[place, piece, pl.ds(share.first_column, share.num_columns)]
                plgpu.wgmma(sums, rows, weights.T)
            plgpu.wgmma_wait(NUM_PIECES)  # the products of the step before are done
            pl.when(index > 0)(lambda: free(step - 1))

        found = one[...], other[...]
        free(done + (sizes.num_steps - 1))
        return found

    sums = plgpu.WGMMAAccumulatorRef((LEAST_ROWS, share.num_columns), jnp.float32)
    return pl.run_scoped(run, sums, sums)


def _put(number: int, result: jax.Array, places: dict[str, Any]) -> None:
    share = _share(places)
    columns = pl.ds(number * places["weight_places"].shape[2] + share.first_column, share.num_columns)
    places["result"][share.rows, columns] = result
