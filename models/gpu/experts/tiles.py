"""Blocks of one expert's rows times its weights in tiles, worked off by processors in turn: what all forms share.

Three warpgroups share a block of rows and a tile of columns. One loads, several steps of the summed features ahead; the
other two multiply. A tile has two pieces of columns: gate and up of the same columns, of which silu(gate) * up is made,
or neighbours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moonshard.models.gpu import card
from moonshard.models.gpu.tensor_cores import Interpret, await_all_free
from moonshard.sharding.arrays import Array, Float, Int

LEAST_ROWS = 64  # of a product on the tensor cores
MAX_ROWS = 2 * LEAST_ROWS  # of a block
NUM_COMPUTING = 2
LOADER = NUM_COMPUTING
NUM_PIECES = 2  # of a tile's columns
REGISTERS, LOADER_REGISTERS = 232, 40


class Cut(NamedTuple):
    """How a product is cut."""

    columns: int  # of a piece
    depth: int  # summed features of a step
    num_stages: int  # steps whose loads are under way together


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Which rows are whose: rows of block b are from b * num_rows on."""

    num_rows: int  # of a block: 16, 32, 64 or 128
    experts: Int[Array, "blocks"]
    where: Int[Array, "2"]  # the layer, and how many blocks are used


class Sizes(NamedTuple):
    """What is multiplied, by how many: a product is a block of rows and a tile of columns."""

    num_rows: int  # of a block
    num_experts: int  # of a layer
    num_matrices: int  # of an expert: 2, gate and up, or 1
    num_own: int  # columns of a matrix, and of the result
    depth: int  # summed features
    cut: Cut

    @property
    def columns(self) -> int:
        """Of a tile of the result."""
        return self.cut.columns * (NUM_PIECES + 1 - self.num_matrices)

    @property
    def num_tiles(self) -> int:
        return self.num_own // self.columns

    @property
    def num_steps(self) -> int:
        """Of a product."""
        return self.depth // self.cut.depth

    def places(self, held: int, weights: Mapping[str, Any], arrivals: int, dtype: Any) -> dict[str, Any]:
        """In shared memory: of each stage `held` rows and what a form has of weights, a result, and what tells of them.

        `arrivals`: copies of a stage.
        """
        stages = self.cut.num_stages
        return {
            "row_places": plgpu.SMEM((stages, held, self.cut.depth), dtype),
            **weights,
            "result": plgpu.SMEM((held, self.columns), dtype),
            "loaded": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=stages),
            "result_free": plgpu.Barrier(num_arrivals=NUM_COMPUTING),
            "result_there": plgpu.Barrier(num_arrivals=NUM_COMPUTING),
        }


class Piece(NamedTuple):
    """Where a piece of a tile's columns begins in the stack of all layers' matrices."""

    matrix: Any
    column: Any  # of the matrix
    row: Any  # of the whole stack, whose rows are columns of the result


class Tile(NamedTuple):
    """One of a processor's products."""

    block: Any
    column: Any  # of the result
    pieces: tuple[Piece, Piece]


class Form(NamedTuple):
    """How weights of one kind are loaded and multiplied."""

    copies: Callable[..., Sequence[tuple[Any, Any]]]  # (weights, piece's number, piece, step, place, places)
    multiply: Callable[..., tuple[Any, Any]]  # (weights, tile, places, done, sizes) -> sums of both pieces
    put: Callable[..., None]  # (piece's number, its sums, places): into the place of the result


def launch(
    form: Form,
    sizes: Sizes,
    rows: Float[Array, "rows f"],
    weights: Sequence[Array],
    blocks: Blocks,
    places: Mapping[str, Any],
    *,
    num_processors: int | None,
    kernel_name: str,
    interpret: Interpret,
) -> Float[Array, "rows o"]:
    """Every used block's rows times its expert's weights; rows of unused blocks are left unwritten."""
    count = num_processors or card.num_processors()

    def kernel(rows, experts, where, *refs, **places):
        _run(form, sizes, count, rows, experts, where, refs[:-1], refs[-1], places)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(rows), sizes.num_own), rows.dtype),
        scratch_types=places,
        grid=(count,),
        grid_names=("processor",),
        num_threads=NUM_COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name=kernel_name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return call(rows, blocks.experts, blocks.where, *weights)


def _locate(sizes: Sizes, layer: Any, experts: Any, product: Any) -> Tile:
    """Products of a block follow one another."""
    block, tile = (op(product, jnp.int32(sizes.num_tiles)) for op in (jax.lax.div, jax.lax.rem))
    matrix, column = (layer * sizes.num_experts + experts[block]) * sizes.num_matrices, tile * sizes.columns
    other = (matrix + 1, column) if sizes.num_matrices == 2 else (matrix, column + sizes.cut.columns)
    one, other = (Piece(*where, where[0] * sizes.num_own + where[1]) for where in ((matrix, column), other))
    return Tile(block, column, (one, other))


def _run(
    form: Form,
    sizes: Sizes,
    num_processors: int,
    rows: Any,
    experts: Any,
    where: Any,
    weights: tuple[Any, ...],
    out: Any,
    places: dict[str, Any],
) -> None:
    processor, warpgroup = jax.lax.axis_index("processor"), jax.lax.axis_index("warpgroup")
    layer, num_products = where[0], where[1] * sizes.num_tiles
    num_own = jax.lax.div(num_products - processor + (num_processors - 1), num_processors)

    def locate(number: Any) -> tuple[Tile, Any]:
        tile = _locate(sizes, layer, experts, processor + number * num_processors)
        return tile, pl.ds(tile.block * sizes.num_rows, sizes.num_rows)

    @pl.when(warpgroup == LOADER)
    def _():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

        @pl.loop(0, num_own)
        def _(number):
            tile, own_rows = locate(number)
            _load(form, rows.at[own_rows], weights, tile, number * sizes.num_steps, sizes, places)

        await_all_free(places["free"], num_own * sizes.num_steps)

    @pl.when(warpgroup != LOADER)
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")

        @pl.loop(0, num_own)
        def _(number):
            tile, own_rows = locate(number)
            sums = form.multiply(weights, tile, places, number * sizes.num_steps, sizes)
            _store(form, sums, out.at[own_rows, pl.ds(tile.column, sizes.columns)], places, sizes)

        plgpu.wait_smem_to_gmem(0)


def _load(
    form: Form, rows: Any, weights: tuple[Any, ...], tile: Tile, done: Any, sizes: Sizes, places: dict[str, Any]
) -> None:
    """Loads a step's rows and weights into the places in turn, each once both that compute have done with the last.

    `done` steps were loaded before.
    """

    @pl.loop(0, sizes.num_steps)
    def _(index):
        step = done + index
        place = place_of(step, sizes)

        @pl.when(step >= sizes.cut.num_stages)
        def _():
            plgpu.barrier_wait(places["free"].at[place])

        loaded = places["loaded"].at[place]
        for number, piece in enumerate(tile.pieces):
            for source, target in form.copies(weights, number, piece, index, place, places):
                plgpu.copy_gmem_to_smem(source, target, loaded)
        target = places["row_places"].at[place, pl.ds(0, rows.shape[0])]
        plgpu.copy_gmem_to_smem(rows.at[:, pl.ds(index * sizes.cut.depth, sizes.cut.depth)], target, loaded)


def place_of(step: Any, sizes: Sizes) -> Any:
    """The stage that a step, counted through all products of a processor, lies in."""
    return jax.lax.rem(step, jnp.int32(sizes.cut.num_stages))


def _store(form: Form, sums: tuple[Any, Any], target: Any, places: dict[str, Any], sizes: Sizes) -> None:
    """Both shares of a result, to where its block's rows are; the place for it is free once the last one was read."""
    warpgroup = jax.lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    plgpu.barrier_arrive(places["result_free"])
    plgpu.barrier_wait(places["result_free"])
    results = (jax.nn.silu(sums[0]) * sums[1],) if sizes.num_matrices == 2 else sums
    for number, result in enumerate(results):
        form.put(number, result.astype(places["result"].dtype), places)
    plgpu.commit_smem()
    plgpu.barrier_arrive(places["result_there"])
    plgpu.barrier_wait(places["result_there"])

    @pl.when(warpgroup == 0)
    def _():
        plgpu.copy_smem_to_gmem(places["result"].at[pl.ds(0, target.shape[0])], target)
