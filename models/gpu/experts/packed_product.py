"""Products of blocks of rows with packed weights, which travel as they are stored and are unpacked in registers.

Columns of the result are the rows of the tensor cores' left side, which may lie in registers; a block's rows are its
columns, so that as many are multiplied as a block has, from 16 on. Each of the two warpgroups that multiply has half of
a piece's columns, and unpacks while the other multiplies.
An int4 weight is exactly bf16((code - 8) * scale). Codes of fp8 and int8 are exact in bfloat16, and their scales, in
float32, are multiplied with the sums of their blocks: no weight is rounded.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.quantised import Quantised
from moonshard.models.gpu.experts.registers import GROUP, PACKINGS, scales_layout, spread, unpacked
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
from moonshard.models.gpu.tensor_cores import OF_ROWS, WIDE, Interpret, add_product, along_rows
from moonshard.sharding.arrays import Array, Float

COLUMNS = NUM_COMPUTING * LEAST_ROWS  # of a piece
SCALES = 8  # of a row that one copy brings: it brings 16 bytes or more
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


def most_rows(format: str) -> int:
    """Of a block: sums of 128 rows, and those of one block of fp8 besides, are more than registers hold."""
    return LEAST_ROWS if format == "fp8" else MAX_ROWS


def cut_for(format: str, num_rows: int) -> Cut:
    """As many stages as fit."""
    if format == "int4":
        depth, num_stages = {16: (256, 4), 32: (256, 4), 64: (256, 2), 128: (128, 3)}[num_rows]
    else:
        depth, num_stages = 128, {16: 5, 32: 5, 64: 4, 128: 2}[num_rows]
    return Cut(columns=COLUMNS, depth=depth, num_stages=num_stages)


def why_not_packed(weights: Quantised[Array]) -> str | None:
    """What the kernel does not take about weights [..., out, in]; None: it takes them."""
    *_, num_own, depth = weights.shape
    block = weights.block[-2:]
    if num_own % (NUM_PIECES * COLUMNS) or depth % (SCALES * GROUP):
        return (
            f"packed weights have {NUM_PIECES * COLUMNS}s of columns and of summed features, not {num_own} and {depth}"
        )
    fits = {
        "int4": block == (1, GROUP),
        "fp8": block[0] % LEAST_ROWS == 0 and block[1] % 128 == 0,
        "int8": block == (1, depth),
    }
    return None if fits[weights.format] else f"{weights.format} has other blocks here, {block[0]} x {block[1]}"


def packed_product(
    rows: Float[Array, "rows f"],
    weights: Quantised[Array],
    blocks: Blocks,
    *,
    cut: Cut | None = None,
    num_processors: int | None = None,
    kernel_name: str = "experts_down",
    interpret: Interpret = None,
) -> Float[Array, "rows o"]:
    """As `grouped_product`, of weights [l e p o d] that `why_not_packed` has nothing against.

    `rows` are `registers.ordered`.
    """
    _, num_experts, num_matrices, num_own, depth = weights.shape
    cut = cut or cut_for(weights.format, blocks.num_rows)
    sizes = Sizes(
        num_rows=blocks.num_rows,
        num_experts=num_experts,
        num_matrices=num_matrices,
        num_own=num_own,
        depth=depth,
        cut=cut,
    )
    kind = _Kind(weights.format, weights.block[-2:], weights.scales.shape[-2], interpret)
    values, scales = (each.reshape(-1, each.shape[-1]) for each in (weights.values, weights.scales))
    own = _weight_places(weights, cut)
    return launch(
        Form(_copies, functools.partial(_multiply, kind), _put),
        sizes,
        rows,
        (values, scales),
        blocks,
        sizes.places(blocks.num_rows, own, 1 + NUM_PIECES * len(own), rows.dtype),
        num_processors=num_processors,
        kernel_name=f"experts_gate_up_{weights.format}" if num_matrices == 2 else f"{kernel_name}_{weights.format}",
        interpret=interpret,
    )


class _Kind(NamedTuple):
    """What is the same for all tiles."""

    format: str
    block: tuple[int, ...]  # columns of the result, and summed features
    blocks_of_matrix: int  # along its columns
    interpret: Interpret


def _weight_places(weights: Quantised[Array], cut: Cut) -> dict[str, Any]:
    """Of the pieces of each stage."""
    width = cut.depth // FORMATS[weights.format].codes_per_item
    shape = (cut.num_stages, NUM_PIECES, COLUMNS)
    found = {"word_places": plgpu.SMEM((*shape, width), weights.values.dtype)}
    if weights.format == "int4":
        found["scale_places"] = plgpu.SMEM((*shape, SCALES), weights.scales.dtype)
    return found


def _copies(weights: tuple[Any, ...], number: int, piece: Piece, index: Any, place: Any, places: dict[str, Any]) -> Any:
    own_rows, (values, scales) = pl.ds(piece.row, COLUMNS), weights
    width, depth = places["word_places"].shape[-1], places["row_places"].shape[-1]
    copies = [(values.at[own_rows, pl.ds(index * width, width)], places["word_places"].at[place, number])]
    if "scale_places" in places:
        first = jax.lax.div(index * depth, jnp.int32(SCALES * GROUP)) * SCALES
        copies.append((scales.at[own_rows, pl.ds(first, SCALES)], places["scale_places"].at[place, number]))
    return copies


def _multiply(
    kind: _Kind, weights: tuple[Any, ...], tile: Tile, places: dict[str, Any], done: Any, sizes: Sizes
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's share of both pieces; `done` steps were multiplied before."""
    add = {"int4": _add_groups, "fp8": _add_blocks, "int8": _add_codes}[kind.format]
    one, other = (_Share(kind, weights[1], number, piece, places) for number, piece in enumerate(tile.pieces))

    def step(index: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        place = place_of(done + index, sizes)
        plgpu.barrier_wait(places["loaded"].at[place])
        found = add(one, sums[0], index, place), add(other, sums[1], index, place)
        plgpu.barrier_arrive(places["free"].at[place])
        return found

    nothing = plgpu.layout_cast(jnp.zeros((LEAST_ROWS, sizes.num_rows), jnp.float32), WIDE)
    sums = jax.lax.fori_loop(0, sizes.num_steps, step, (nothing, nothing))
    if kind.format != "int8":
        return sums
    return sums[0] * one.scales_of_rows(sizes.num_rows), sums[1] * other.scales_of_rows(sizes.num_rows)


def _own_columns() -> Any:
    return pl.ds(jax.lax.axis_index("warpgroup") * LEAST_ROWS, LEAST_ROWS)


class _Share(NamedTuple):
    """What a warpgroup has of a piece of columns."""

    kind: _Kind
    scales: Any  # in device memory
    number: int  # of the piece
    piece: Piece
    places: dict[str, Any]

    @property
    def depth(self) -> int:
        """Summed features of a step."""
        return self.places["row_places"].shape[-1]

    def codes(self, place: Any) -> jax.Array:
        """As numbers in registers."""
        words = self.places["word_places"].at[place, self.number, _own_columns()]
        loaded = plgpu.load(words, layout=PACKINGS[self.kind.format].layout)
        return unpacked(loaded, self.kind.format, self.kind.interpret)

    def scales_of_groups(self, index: Any, place: Any) -> jax.Array:
        """At every code of a step."""
        count = self.depth // GROUP
        first = jax.lax.rem(index * count, jnp.int32(SCALES)) if count < SCALES else 0
        own = self.places["scale_places"].at[place, self.number, _own_columns(), pl.ds(first, count)]
        return spread(plgpu.load(own, layout=scales_layout(count)), self.kind.interpret)

    def scale_of_block(self, index: Any) -> Any:
        """That of all codes of a step."""
        block_columns, block_features = self.kind.block
        column = self.piece.column + _own_columns().start
        row = self.piece.matrix * self.kind.blocks_of_matrix + jax.lax.div(column, jnp.int32(block_columns))
        return self.scales[row, jax.lax.div(index * self.depth, jnp.int32(block_features))]

    def scales_of_rows(self, num_rows: int) -> jax.Array:
        """At the sums of so many rows of a block."""
        own = pl.ds(self.piece.row + _own_columns().start, LEAST_ROWS)
        scales = plgpu.load(self.scales.at[own, 0], layout=OF_ROWS, optimized=False)
        return along_rows(scales, (LEAST_ROWS, num_rows))

    def add(self, sums: jax.Array, weights: jax.Array, place: Any) -> jax.Array:
        return add_product(sums, weights, self.places["row_places"].at[place].T, self.kind.interpret)


def _add_groups(share: _Share, sums: jax.Array, index: Any, place: Any) -> jax.Array:
    """Adds the products of a step: of weights as they are, which are rounded to bfloat16."""
    return share.add(sums, share.codes(place) * share.scales_of_groups(index, place), place)


def _add_blocks(share: _Share, sums: jax.Array, index: Any, place: Any) -> jax.Array:
    """Adds the products of a step, of codes, times the scale of the block that they are in."""
    scale = share.scale_of_block(index)  # asked for before it is waited for
    nothing = plgpu.layout_cast(jnp.zeros(sums.shape, jnp.float32), WIDE)
    return sums + share.add(nothing, share.codes(place), place) * scale


def _add_codes(share: _Share, sums: jax.Array, index: Any, place: Any) -> jax.Array:
    """Adds the products of a step, of codes: a row's scale is the same for all steps."""
    del index
    return share.add(sums, share.codes(place), place)


def _put(number: int, result: jax.Array, places: dict[str, Any]) -> None:
    """Into the place of the result, whose columns these rows are."""
    own = pl.ds(number * COLUMNS + _own_columns().start, LEAST_ROWS)
    places["result"].at[:, own].T[...] = plgpu.layout_cast(result, TRANSPOSED)
