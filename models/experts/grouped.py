"""The MoE backend for NVIDIA GPUs: two kernels over blocks of one expert's tokens, in place of `moe.blocks`' loop.

The first kernel gathers a block's tokens and computes silu(gate) * up, the second the down projection; each program
owns one block of rows and one tile of output columns. Expert weights are read where they lie in the layer-stacked
arrays, once per block of rows, so a decode step (few tokens per expert) streams the chosen experts' weights and little
else. Programs of unused blocks end at once. Sums are float32.
Written in Pallas for its Triton lowering, which jax 0.11 and 0.12 both carry, deprecated in favour of Mosaic GPU: the
bound on jax in pyproject.toml holds until this moves. It runs on one device: on a mesh, call it inside `shard_map`. It
takes no quantised weights and does not choose tiles at run time.
Source: MegaBlocks (arXiv 2211.15841), section 5.1, for grouped products over padded blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from moonshard.models.experts import moe
from moonshard.sharding.arrays import Array, Bool, Float, Int

MIN_TILE, MAX_ROWS = 16, 128  # tensor cores take no side below 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How a kernel cuts its work. `columns` and `depth` shrink to the largest power of two that divides the side."""

    rows: int  # tokens of a block
    columns: int  # output features of a program: of gate and of up each, or of the down projection
    depth_bytes: int  # contracted features per step of the loop, in bytes
    num_warps: int
    num_stages: int  # loop steps whose loads are in flight together


# Of 227 KiB of shared memory on a Hopper multiprocessor, a program takes 72, 160 and 192 KiB.
STREAMING = Tiles(rows=16, columns=64, depth_bytes=256, num_warps=4, num_stages=3)
BALANCED = Tiles(rows=64, columns=128, depth_bytes=128, num_warps=8, num_stages=4)
COMPUTING = Tiles(rows=128, columns=128, depth_bytes=128, num_warps=8, num_stages=4)


def tiles_for(num_pairs: int, num_experts: int) -> Tiles:
    """Blocks hold a quarter more than an expert's mean share, so that most experts' weights are read once."""
    mean = max(1, num_pairs // num_experts)
    rows = min(MAX_ROWS, max(MIN_TILE, 1 << (mean + mean // 4 - 1).bit_length()))
    kind = STREAMING if rows <= 32 else BALANCED if rows == 64 else COMPUTING
    return replace(kind, rows=rows)


def grouped(
    x: Float[Array, "t d"],
    routing: moe.Routing,
    valid: Bool[Array, "t"],
    experts: moe.Experts[Array],
    layer: Int[Array, ""],
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "t d"]:
    """Each chosen expert on its own tokens, all blocks at once.

    Args:
        interpret: run the kernels as plain jax operations, on any platform.

    Raises:
        ValueError: an embed or ffw size that 16 does not divide.
    """
    (t, k), num_experts = routing.experts.shape, experts.down.shape[1]
    tiles = tiles or tiles_for(t * k, num_experts)
    places, block_experts, num_used = moe.assign_blocks(routing.experts, valid, num_experts, tiles.rows)
    num_rows = len(block_experts) * tiles.rows
    token_of_row = jnp.zeros(num_rows, jnp.int32).at[places].set(jnp.arange(t * k, dtype=jnp.int32) // k, mode="drop")
    where = jnp.stack([layer, num_used]).astype(jnp.int32)
    block_experts = block_experts.astype(jnp.int32)
    hidden = _gate_up(x, token_of_row, block_experts, where, experts.gate_up, tiles, interpret)
    rows = _down(hidden, block_experts, where, experts.down, tiles, interpret)
    chosen = rows.at[places].get(mode="fill", fill_value=0).reshape(t, k, -1)
    return jnp.einsum("tkd,tk->td", chosen, routing.weights, preferred_element_type=jnp.float32).astype(x.dtype)


def _gate_up(
    x: Float[Array, "t d"],
    token_of_row: Int[Array, "rows"],
    block_experts: Int[Array, "blocks"],
    where: Int[Array, "2"],
    weights: Float[Array, "l e 2 f d"],
    tiles: Tiles,
    interpret: bool,
) -> Float[Array, "rows f"]:
    """silu(gate) * up of every used row; the other rows are left unwritten."""
    f, d = weights.shape[3:]
    columns, depth = _tile(f, tiles.columns), _tile(d, tiles.depth_bytes // x.dtype.itemsize)

    def kernel(x_ref, tokens_ref, experts_ref, where_ref, weights_ref, out_ref):
        tile, block = pl.program_id(0), pl.program_id(1)
        rows = pl.ds(block * tiles.rows, tiles.rows)
        across = pl.ds(tile * columns, columns)

        @pl.when(block < where_ref[1])
        def _():
            layer, expert, tokens = where_ref[0], experts_ref[block], tokens_ref[rows]

            def step(index, sums):
                gate, up = sums
                along = pl.ds(index * depth, depth)
                left = x_ref[tokens, along]
                gate += _dot(left, weights_ref[layer, expert, 0, across, along])
                up += _dot(left, weights_ref[layer, expert, 1, across, along])
                return gate, up

            zero = jnp.zeros((tiles.rows, columns), jnp.float32)
            gate, up = jax.lax.fori_loop(0, d // depth, step, (zero, zero))
            out_ref[rows, across] = (jax.nn.silu(gate) * up).astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((len(token_of_row), f), x.dtype)
    call = _launch(kernel, "moe_gate_up", out, (f // columns, len(block_experts)), tiles, interpret)
    return call(x, token_of_row, block_experts, where, weights)


def _down(
    hidden: Float[Array, "rows f"],
    block_experts: Int[Array, "blocks"],
    where: Int[Array, "2"],
    weights: Float[Array, "l e d f"],
    tiles: Tiles,
    interpret: bool,
) -> Float[Array, "rows d"]:
    """The down projection of every used row; the other rows are left unwritten."""
    d, f = weights.shape[2:]
    columns, depth = _tile(d, 2 * tiles.columns), _tile(f, tiles.depth_bytes // hidden.dtype.itemsize)

    def kernel(hidden_ref, experts_ref, where_ref, weights_ref, out_ref):
        tile, block = pl.program_id(0), pl.program_id(1)
        rows = pl.ds(block * tiles.rows, tiles.rows)
        across = pl.ds(tile * columns, columns)

        @pl.when(block < where_ref[1])
        def _():
            layer, expert = where_ref[0], experts_ref[block]

            def step(index, total):
                along = pl.ds(index * depth, depth)
                return total + _dot(hidden_ref[rows, along], weights_ref[layer, expert, across, along])

            zero = jnp.zeros((tiles.rows, columns), jnp.float32)
            out_ref[rows, across] = jax.lax.fori_loop(0, f // depth, step, zero).astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((hidden.shape[0], d), hidden.dtype)
    call = _launch(kernel, "moe_down", out, (d // columns, len(block_experts)), tiles, interpret)
    return call(hidden, block_experts, where, weights)


def _launch(
    kernel: Callable[..., None],
    name: str,
    out: jax.ShapeDtypeStruct,
    grid: tuple[int, int],
    tiles: Tiles,
    interpret: bool,
) -> Callable[..., Any]:
    """Column tiles are the grid's fast axis: programs that run together share an expert, and so its tokens in L2."""
    parameters = plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    return pl.pallas_call(kernel, out_shape=out, grid=grid, name=name, compiler_params=parameters, interpret=interpret)


def _dot(left: Float[Array, "m r"], right: Float[Array, "n r"]) -> Float[Array, "m n"]:
    """left · rightᵀ in float32; float32 operands are not rounded on the way."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(left, right, contract, precision=precision, preferred_element_type=jnp.float32)


def _tile(side: int, wanted: int) -> int:
    """The largest power of two up to `wanted` that divides the side."""
    tile = min(wanted, side & -side)
    if tile < MIN_TILE:
        raise ValueError(f"a side of {side} features cannot be cut into tiles of at least {MIN_TILE}")
    return tile
