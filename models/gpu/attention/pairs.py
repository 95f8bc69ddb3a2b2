"""Tiles of 64 queries over pairs of key tiles: the form of `latent`'s kernel in which no product is done twice.

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
from moonshard.models.gpu.attention.tiles import (
    KEYS,
    NUM_COMPUTING,
    ROWS,
    Splits,
    Task,
    TileForm,
    TileQueries,
    farthest_of,
    half_of,
    launch,
    of_no_keys,
    pieces_of_keys,
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
    """As `tiles.attend_tiles`, in splits of pairs; the pages have `ROTARY` features besides the latent."""
    f = queries.shape[2]
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

    form = TileForm("latent_attention_pairs", PAIR, places, _load_pairs, _attend)
    task = Task(num_heads, value_rank, scale, num_splits, interpret)
    return launch(form, task, queries, pages, layer, block_tables, positions)


def _half(places: dict[str, Any], which: Any) -> Any:
    return half_of(NUM_COMPUTING * places["latent_places"].shape[3], which)


def _load_pairs(
    pages: Any,
    layer: Any,
    tables: Any,
    sequence: Any,
    first: Any,
    stop: Any,
    queries: TileQueries,
    places: dict[str, Any],
) -> None:
    """Loads pairs of key tiles, each part once its place was read; the last tile stands for one that there is not.

    What is free first comes first: the parts that both scorers sum themselves.
    """
    last = jax.lax.div(farthest_of(queries), jnp.int32(KEYS))
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
    places: dict[str, Any], warpgroup: Any, features: Any, visible: Any, first: Any, stop: Any, task: Task
) -> tuple[Any, Any, Any]:
    """Attention over pairs from `first` to `stop`: the values' own features, not normalised, peak and total."""
    own, other = warpgroup, 1 - warpgroup
    latents, factor = places["latent_places"], task.scale * math.log2(math.e)
    shape = (ROWS, features.size)

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
        mixed = add_product(mixed, weights, latents.at[own, own], task.interpret)
        plgpu.barrier_arrive(places["own_free"].at[own])
        plgpu.barrier_wait(places["weights_there"])
        plgpu.barrier_wait(places["other_loaded"].at[other])
        others = places["rotary_places"].at[other]
        mixed = add_product(mixed, others, latents.at[other, own], task.interpret)
        plgpu.barrier_arrive(places["other_free"].at[other])
        return mixed, higher, total

    mixed, peak, total = jax.lax.fori_loop(first, stop, step, of_no_keys(shape))
    return mixed, peak, total + _exchange(places, warpgroup, total)
