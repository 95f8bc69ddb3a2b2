"""Tiles of 64 queries over pairs of key tiles: the form of `attention`'s kernel in which no product is done twice.

Three warpgroups share a tile of queries. One loads; each of the others scores one key tile of a pair, tells the other
its peaks and its weights through shared memory, and sums half of the features of both tiles' values. Weights lie where
their keys' rotary features lay, which only scores need: there is no room besides. A key tile is loaded in two parts,
each when the warpgroup that sums its values has done with it, so that loads go on under products.
Source: FlashMLA (DeepSeek, 2025) for two warpgroups that each score a key tile and sum half of the values' features.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moonshard.kv.pages import Pages
from moonshard.models.gpu.attention_tiles import (
    KEYS,
    LEAST,
    LOADER,
    LOADER_REGISTERS,
    NUM_COMPUTING,
    REGISTERS,
    ROWS,
    Epilogue,
    Splits,
    farthest_of,
    keys_of_split,
    last_visible,
    pieces_of_keys,
    queries_of,
    splits_of,
)
from moonshard.models.gpu.tensor_cores import OF_ROWS, WIDE, Interpret, add_product, along_rows, await_all_free
from moonshard.sharding.arrays import Array, Float, Int

PAIR = NUM_COMPUTING * KEYS  # keys of a step
ROTARY = KEYS  # features: as many as a row of weights has keys


def attend_pairs(
    queries: Float[Array, "n rows f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    num_heads: int,
    value_rank: int,
    scale: float,
    num_splits: int,
    interpret: Interpret,
) -> Splits:
    """As `attention_tiles.attend_tiles`, in splits of pairs; the pages have `ROTARY` features besides the latent."""
    n, num_rows, f = queries.shape
    copies = KEYS // min(pages.shape[2], KEYS)
    places = {
        "query_place": plgpu.SMEM((ROWS, f), queries.dtype),
        "latent_places": plgpu.SMEM(
            (NUM_COMPUTING, NUM_COMPUTING, KEYS, value_rank // NUM_COMPUTING), pages.dtype
        ),  # halves
        "rotary_places": plgpu.SMEM((NUM_COMPUTING, KEYS, ROTARY), pages.dtype),  # then weights
        "peaks": plgpu.SMEM((NUM_COMPUTING, ROWS), jnp.float32),
        "queries_loaded": plgpu.Barrier(),
        # of a place: the half of the features that its scorer sums; the other half, and the rotary features
        "own_loaded": plgpu.Barrier(num_arrivals=copies, num_barriers=NUM_COMPUTING),
        "other_loaded": plgpu.Barrier(num_arrivals=2 * copies, num_barriers=NUM_COMPUTING),
        "own_free": plgpu.Barrier(num_barriers=NUM_COMPUTING),
        "other_free": plgpu.Barrier(num_barriers=NUM_COMPUTING),
        "peaks_there": plgpu.Barrier(num_arrivals=NUM_COMPUTING),
        "weights_there": plgpu.Barrier(num_arrivals=NUM_COMPUTING),
    }

    def kernel(queries, pages, layer, tables, positions, *out, **places):
        _kernel(queries, pages, layer, tables, positions, out, places, num_heads, scale, num_splits, interpret)

    call = plgpu.kernel(
        kernel,
        out_type=splits_of(queries, value_rank, num_splits),
        scratch_types=places,
        grid=(num_rows // ROWS, n, num_splits),
        grid_names=("tile", "sequence", "split"),
        num_threads=NUM_COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name="latent_attention_pairs",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return Splits(*call(queries, pages, layer.astype(jnp.int32).reshape(1), block_tables, positions))


def _kernel(
    queries: Any,
    pages: Any,
    layer: Any,
    tables: Any,
    positions: Any,
    out: tuple[Any, ...],
    places: dict[str, Any],
    num_heads: int,
    scale: float,
    num_splits: int,
    interpret: Interpret,
) -> None:
    tile, sequence, split = (jax.lax.axis_index(name) for name in ("tile", "sequence", "split"))
    warpgroup = jax.lax.axis_index("warpgroup")
    rows, own_queries = pl.ds(tile * ROWS, ROWS), queries_of(tile, positions, sequence, num_heads)
    each, end = keys_of_split(own_queries, num_splits, PAIR)
    first = split * each
    stop = jnp.minimum(first + each, end)
    epilogue = Epilogue(out, (split, sequence), rows, _half(places, warpgroup), warpgroup)

    @pl.when((first < stop) & (warpgroup == LOADER))
    def _():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        plgpu.copy_gmem_to_smem(queries.at[sequence, rows], places["query_place"], places["queries_loaded"])
        last = jax.lax.div(farthest_of(own_queries), jnp.int32(KEYS))
        _load_pairs(pages, layer[0], tables, sequence, first, stop, last, places)

    @pl.when((first < stop) & (warpgroup != LOADER))
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        visible = last_visible(tile, own_queries, num_heads)
        plgpu.barrier_wait(places["queries_loaded"])
        epilogue.store(*_attend(places, warpgroup, visible, first, stop, scale, interpret))

    if num_splits == 1:
        pl.when((first >= stop) & (warpgroup != LOADER))(epilogue.store_nothing)


def _half(places: dict[str, Any], which: Any) -> Any:
    """The features of a latent that a warpgroup sums."""
    size = places["latent_places"].shape[3]
    return pl.ds(which * size, size)


def _load_pairs(
    pages: Any, layer: Any, tables: Any, sequence: Any, first: Any, stop: Any, last: Any, places: dict[str, Any]
) -> None:
    """Loads pairs of key tiles, each part once its place was read; `last` stands for a tile that there is not.

    What is free first comes first: the parts that both scorers sum themselves.
    """
    latents = places["latent_places"]
    rotary = pl.ds(NUM_COMPUTING * latents.shape[3], ROTARY)

    @pl.loop(first, stop)
    def _(index):
        tiles = [jnp.minimum(index * NUM_COMPUTING + place, last) for place in range(NUM_COMPUTING)]
        pieces = [pieces_of_keys(pages, layer, tables, sequence, tile) for tile in tiles]
        for place in range(NUM_COMPUTING):
            pl.when(index > first)(lambda place=place: plgpu.barrier_wait(places["own_free"].at[place]))
            half, loaded = _half(places, place), places["own_loaded"].at[place]
            for source, own in pieces[place]:
                plgpu.copy_gmem_to_smem(source.at[:, half], latents.at[place, place, own], loaded)
        for place in range(NUM_COMPUTING):
            pl.when(index > first)(lambda place=place: plgpu.barrier_wait(places["other_free"].at[place]))
            half, loaded = _half(places, 1 - place), places["other_loaded"].at[place]
            for source, own in pieces[place]:
                plgpu.copy_gmem_to_smem(source.at[:, rotary], places["rotary_places"].at[place, own], loaded)
                plgpu.copy_gmem_to_smem(source.at[:, half], latents.at[place, 1 - place, own], loaded)

    await_all_free(places["own_free"], (stop - first) * NUM_COMPUTING)
    await_all_free(places["other_free"], (stop - first) * NUM_COMPUTING)


def _score(places: dict[str, Any], warpgroup: Any) -> jax.Array:
    """A warpgroup's own key tile's scores, before scaling: of each part as it comes."""
    queries, latents = places["query_place"], places["latent_places"]
    rotary = pl.ds(NUM_COMPUTING * latents.shape[3], ROTARY)

    def run(sums: Any) -> jax.Array:
        for which, loaded in ((warpgroup, "own_loaded"), (1 - warpgroup, "other_loaded")):
            plgpu.barrier_wait(places[loaded].at[warpgroup])
            plgpu.wgmma(sums, queries.at[:, _half(places, which)], latents.at[warpgroup, which].T)
        plgpu.wgmma(sums, queries.at[:, rotary], places["rotary_places"].at[warpgroup].T)
        return sums[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((ROWS, KEYS), jnp.float32))


def _exchange(places: dict[str, Any], warpgroup: Any, values: jax.Array) -> jax.Array:
    """What the other computing warpgroup gives for a value of each row."""
    places["peaks"].at[warpgroup][...] = values
    plgpu.barrier_arrive(places["peaks_there"])
    plgpu.barrier_wait(places["peaks_there"])
    return plgpu.load(places["peaks"].at[1 - warpgroup], layout=OF_ROWS)


def _attend(
    places: dict[str, Any], warpgroup: Any, visible: Any, first: Any, stop: Any, scale: float, interpret: Interpret
) -> tuple[Any, Any, Any]:
    """Attention over pairs from `first` to `stop`: the values' own features, not normalised, peak and total."""
    own, other = warpgroup, 1 - warpgroup
    latents, factor = places["latent_places"], scale * math.log2(math.e)
    shape = (ROWS, latents.shape[3])

    def step(index, carry):
        mixed, peak, total = carry
        scores = _score(places, warpgroup)
        start = index * PAIR + own * KEYS
        positions = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=WIDE) + start
        scores = jnp.where(positions <= along_rows(visible, (ROWS, KEYS)), scores, -jnp.inf)
        mine = jnp.maximum(peak, scores.max(axis=1) * factor)
        higher = jnp.maximum(mine, _exchange(places, warpgroup, mine))
        decay = jnp.exp2(peak - higher)
        weights = jnp.exp2(scores * factor - along_rows(higher, (ROWS, KEYS)))  # one instruction of both
        total = total * decay + weights.sum(axis=1)
        weights = weights.astype(jnp.bfloat16)
        places["rotary_places"].at[own][...] = weights
        plgpu.commit_smem()
        plgpu.barrier_arrive(places["weights_there"])
        mixed = mixed * along_rows(decay, shape)
        mixed = add_product(mixed, weights, latents.at[own, own], interpret)
        plgpu.barrier_arrive(places["own_free"].at[own])
        plgpu.barrier_wait(places["weights_there"])
        plgpu.barrier_wait(places["other_loaded"].at[other])
        others = places["rotary_places"].at[other]
        mixed = add_product(mixed, others, latents.at[other, own], interpret)
        plgpu.barrier_arrive(places["other_free"].at[other])
        return mixed, higher, total

    start = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WIDE),
        plgpu.layout_cast(jnp.full((ROWS,), LEAST, jnp.float32), OF_ROWS),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), OF_ROWS),
    )
    mixed, peak, total = jax.lax.fori_loop(first, stop, step, start)
    return mixed, peak, total + _exchange(places, warpgroup, total)
