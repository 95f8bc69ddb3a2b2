"""Blocks of one expert's rows times its weights, read where they lie in the stack: the kernel of `backend`.

Three warpgroups share a block of rows and a tile of columns. One loads, several steps of the summed features ahead; the
other two multiply, each half of the rows where there are 128, else all of them with half of the columns. A tile has
two pieces of columns: gate and up of the same columns, of which silu(gate) * up is made, or neighbours. Rows are
multiplied in 64s; of a smaller block, only its own are loaded and stored.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from moonshard.models.gpu import card
from moonshard.models.gpu.tensor_cores import Interpret, await_all_free
from moonshard.sharding.arrays import Array, Float, Int

LEAST_ROWS = 64  # of a product on the tensor cores
MAX_ROWS = 2 * LEAST_ROWS
NUM_COMPUTING = 2
LOADER = NUM_COMPUTING
REGISTERS, LOADER_REGISTERS = 232, 40


class Cut(NamedTuple):
    """How a product is cut."""

    columns: int  # of a piece
    depth: int  # summed features of a step
    num_stages: int  # steps whose loads are under way together


CUT = Cut(columns=64, depth=128, num_stages=4)
CUT_OF_MANY_ROWS = Cut(columns=128, depth=64, num_stages=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Which rows are whose: rows of block b are from b * num_rows on."""

    num_rows: int  # of a block: 16, 32, 64 or 128
    experts: Int[Array, "blocks"]
    where: Int[Array, "2"]  # the layer, and how many blocks are used


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
    _, num_experts, num_pieces, num_own, depth = weights.shape
    held = max(blocks.num_rows, LEAST_ROWS)
    cut = cut or (CUT if held == LEAST_ROWS else CUT_OF_MANY_ROWS)
    sizes = _Sizes(
        num_rows=blocks.num_rows,
        num_experts=num_experts,
        num_pieces=num_pieces,
        num_own=num_own,
        columns=cut.columns * (3 - num_pieces),
        num_steps=depth // cut.depth,
        num_processors=num_processors or card.num_processors(),
    )

    def kernel(rows, weights, experts, where, out, **places):
        _kernel(rows, weights, experts, where, out, places, sizes)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(rows), num_own), rows.dtype),
        scratch_types=_places(cut, held, sizes.columns, rows.dtype),
        grid=(sizes.num_processors,),
        grid_names=("processor",),
        num_threads=NUM_COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name="experts_gate_up" if num_pieces == 2 else kernel_name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return call(rows, weights.reshape(-1, depth), blocks.experts, blocks.where)


def _places(cut: Cut, held: int, columns: int, dtype: DTypeLike) -> dict[str, Any]:
    """In shared memory: `held` rows and two pieces of weights of each stage, a result, and what tells of them."""
    return {
        "row_places": plgpu.SMEM((cut.num_stages, held, cut.depth), dtype),
        "weight_places": plgpu.SMEM((cut.num_stages, 2, cut.columns, cut.depth), dtype),
        "result": plgpu.SMEM((held, columns), dtype),
        "loaded": plgpu.Barrier(num_arrivals=3, num_barriers=cut.num_stages),
        "free": plgpu.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=cut.num_stages),
        "result_free": plgpu.Barrier(num_arrivals=NUM_COMPUTING),
        "result_there": plgpu.Barrier(num_arrivals=NUM_COMPUTING),
    }


class _Sizes(NamedTuple):
    """What is multiplied, by how many: a product is a block of rows and a tile of columns."""

    num_rows: int  # of a block
    num_experts: int  # of a layer
    num_pieces: int  # of an expert's weights
    num_own: int  # columns of a piece, and of the result
    columns: int  # of a tile of the result
    num_steps: int  # of a product
    num_processors: int

    @property
    def num_tiles(self) -> int:
        return self.num_own // self.columns

    def num_products(self, processor: Any, num_used: Any) -> Any:
        """How many a processor has of those of the used blocks."""
        return jax.lax.div(num_used * self.num_tiles - processor + (self.num_processors - 1), self.num_processors)

    def locate(self, processor: Any, number: Any) -> tuple[Any, Any]:
        """The block and the tile of one of a processor's products: those of a block follow one another."""
        product = processor + number * self.num_processors
        return jax.lax.div(product, jnp.int32(self.num_tiles)), jax.lax.rem(product, jnp.int32(self.num_tiles))

    def pieces(self, layer: Any, expert: Any, tile: Any) -> tuple[Any, Any]:
        """Where both pieces of a tile's columns begin in the stack."""
        first = (layer * self.num_experts + expert) * self.num_pieces * self.num_own + tile * self.columns
        return first, first + (self.num_own if self.num_pieces == 2 else self.columns // 2)


def _kernel(rows: Any, weights: Any, experts: Any, where: Any, out: Any, places: dict[str, Any], sizes: _Sizes) -> None:
    processor, warpgroup = jax.lax.axis_index("processor"), jax.lax.axis_index("warpgroup")
    layer, num_own_products = where[0], sizes.num_products(processor, where[1])

    @pl.when(warpgroup == LOADER)
    def _():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

        @pl.loop(0, num_own_products)
        def _(number):
            block, tile = sizes.locate(processor, number)
            pieces = sizes.pieces(layer, experts[block], tile)
            own_rows = pl.ds(block * sizes.num_rows, sizes.num_rows)
            _load(rows, weights, own_rows, pieces, number * sizes.num_steps, places)

        await_all_free(places["free"], num_own_products * sizes.num_steps)

    @pl.when(warpgroup != LOADER)
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")

        @pl.loop(0, num_own_products)
        def _(number):
            block, tile = sizes.locate(processor, number)
            sums = _multiply(places, number * sizes.num_steps, sizes.num_steps)
            own_rows, columns = (
                pl.ds(block * sizes.num_rows, sizes.num_rows),
                pl.ds(tile * sizes.columns, sizes.columns),
            )
            _store(sums, out.at[own_rows, columns], places, is_gated=sizes.num_pieces == 2)

        plgpu.wait_smem_to_gmem(0)


def _load(rows: Any, weights: Any, own_rows: Any, pieces: tuple[Any, Any], done: Any, places: dict[str, Any]) -> None:
    """Loads a step's rows and weights into the places in turn, each once both that compute have done with the last.

    `done` steps were loaded before.
    """
    num_stages, _, columns, depth = places["weight_places"].shape

    @pl.loop(0, weights.shape[1] // depth)
    def _(index):
        step = done + index
        place = jax.lax.rem(step, jnp.int32(num_stages))

        @pl.when(step >= num_stages)
        def _():
            plgpu.barrier_wait(places["free"].at[place])

        along, loaded = pl.ds(index * depth, depth), places["loaded"].at[place]
        for piece, first in enumerate(pieces):
            source = weights.at[pl.ds(first, columns), along]
            plgpu.copy_gmem_to_smem(source, places["weight_places"].at[place, piece], loaded)
        target = places["row_places"].at[place, pl.ds(0, own_rows.size)]
        plgpu.copy_gmem_to_smem(rows.at[own_rows, along], target, loaded)


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


def _multiply(places: dict[str, Any], done: Any, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's share of both pieces; `done` steps were multiplied before."""
    num_stages, share = places["row_places"].shape[0], _share(places)

    def free(step: Any) -> None:
        plgpu.barrier_arrive(places["free"].at[jax.lax.rem(step, jnp.int32(num_stages))])

    def run(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
        @pl.loop(0, num_steps)
        def _(index):
            step = done + index
            place = jax.lax.rem(step, jnp.int32(num_stages))
            plgpu.barrier_wait(places["loaded"].at[place])
            rows = places["row_places"].at[place, share.rows]
            for piece, sums in enumerate((one, other)):
                weights = places["weight_places"].at[place, piece, pl.ds(share.first_column, share.num_columns)]
                plgpu.wgmma(sums, rows, weights.T)
            plgpu.wgmma_wait(2)  # the products of the step before are done
            pl.when(index > 0)(lambda: free(step - 1))

        found = one[...], other[...]
        free(done + (num_steps - 1))
        return found

    shape = (LEAST_ROWS, share.num_columns)
    sums = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    return pl.run_scoped(run, sums, sums)


def _store(sums: tuple[jax.Array, jax.Array], target: Any, places: dict[str, Any], *, is_gated: bool) -> None:
    """Both shares of a result, to where its block's rows are; the place for it is free once the last one was read."""
    warpgroup, share = jax.lax.axis_index("warpgroup"), _share(places)
    pl.when(warpgroup == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    plgpu.barrier_arrive(places["result_free"])
    plgpu.barrier_wait(places["result_free"])
    results = (jax.nn.silu(sums[0]) * sums[1],) if is_gated else sums
    for piece, result in enumerate(results):
        columns = pl.ds(piece * places["weight_places"].shape[2] + share.first_column, share.num_columns)
        places["result"][share.rows, columns] = result.astype(places["result"].dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(places["result_there"])
    plgpu.barrier_wait(places["result_there"])

    @pl.when(warpgroup == 0)
    def _():
        plgpu.copy_smem_to_gmem(places["result"].at[pl.ds(0, target.shape[0])], target)
