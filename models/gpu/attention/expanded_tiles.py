"""Tiles of 128 queries of a head over blocks of expanded keys: the kernel of `expanded`.

Three warpgroups share a tile. One loads keys and values, two blocks ahead; each of the others attends for half of the
queries, in turns: one is at its softmax while the other has the tensor cores. A warpgroup passes over blocks that only
the other's queries see, and masks only those that some of its own do not see whole. What is found in one panel of keys
and goes on in the next is kept in float32 as it is, so that a result is the same wherever panels end.
Sources: FlashAttention-3 (arXiv 2407.08608), section 3.1 for the two warpgroups' turns, and its tile for heads of 192.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moonshard.models.gpu.attention.expanded_keys import KEYS, Panel
from moonshard.models.gpu.attention.expanded_queries import NUM_COMPUTING, ROWS, TILE, Seen, Tile, tile_of
from moonshard.models.gpu.attention.tiles import LOADER_REGISTERS, REGISTERS, of_no_keys
from moonshard.models.gpu.tensor_cores import (
    OF_ROWS,
    WIDE,
    Interpret,
    add_product,
    along_rows,
    await_all_free,
    store,
)
from moonshard.sharding.arrays import Array, Float, Int

LOADER = NUM_COMPUTING
NUM_PLACES = 2  # for blocks of keys and values; with the queries of K2's heads they take 208 of 227 KiB


class Sizes(NamedTuple):
    """Of a head."""

    num_heads: int
    nope: int
    rope: int
    value: int
    rank: int  # of latents, which rotary features follow

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a tile takes, in bfloat16."""
        query = self.nope + self.rope
        return 2 * (TILE * query + NUM_PLACES * KEYS * (query + self.value))


class State(NamedTuple):
    """Attention so far, in float32, not normalised and base 2, of queries that see keys of a panel still to come.

    Of others it is not written.
    """

    mixed: Any  # [q, h_v]
    peak: Any  # [h, q]
    total: Any


class Read(NamedTuple):
    """What a tile reads."""

    queries: Any
    latents: Any
    keys: Any
    values: Any
    first: Any
    stop: Any
    blocks: Any
    panel: Any


def attend_panel(
    queries: Float[Array, "q h_k"],
    panel: Panel,
    seen: Seen,
    index: Int[Array, ""],
    found: Sequence[Any] | None,
    *,
    is_only: bool,
    sizes: Sizes,
    scale: float,
    interpret: Interpret,
) -> Sequence[Array]:
    """Attends to panel `index`; queries that see no key of a later panel are done with it.

    Args:
        found: what the first panel gave, as references, written to; None: it is the first.
        is_only: there is no other panel, and no state is given.

    Returns:
        Of the first panel: the values of all heads [q, h_v], of queries that are done, and a `State` of the others.
    """
    num_tiles, dtype = len(queries) // TILE, queries.dtype
    shape, num_features = jax.ShapeDtypeStruct, sizes.num_heads * sizes.value
    each = shape((sizes.num_heads, len(queries)), jnp.float32)
    state = () if is_only else State(shape((len(queries), num_features), jnp.float32), each, each)
    places = {
        "query_place": plgpu.SMEM((NUM_COMPUTING, ROWS, sizes.nope), dtype),  # then results
        "query_rotary_place": plgpu.SMEM((NUM_COMPUTING, ROWS, sizes.rope), dtype),
        "key_places": plgpu.SMEM((NUM_PLACES, KEYS, sizes.nope), dtype),
        "rotary_places": plgpu.SMEM((NUM_PLACES, KEYS, sizes.rope), dtype),
        "value_places": plgpu.SMEM((NUM_PLACES, KEYS, sizes.value), dtype),
        "queries_loaded": plgpu.Barrier(num_arrivals=2, num_barriers=NUM_COMPUTING),
        "keys_loaded": plgpu.Barrier(num_arrivals=2, num_barriers=NUM_PLACES),
        "values_loaded": plgpu.Barrier(num_barriers=NUM_PLACES),
        "keys_free": plgpu.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=NUM_PLACES),
        "values_free": plgpu.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=NUM_PLACES),
        "turn": plgpu.Barrier(num_arrivals=NUM_COMPUTING),
    }
    given = (queries, *panel, *seen, index.astype(jnp.int32).reshape(1))
    num_given = len(given)

    def kernel(*refs, **places):
        read, kept = Read(*refs[:num_given]), None if is_only else State(*refs[num_given + 1 :])
        _kernel(read, refs[num_given], kept, places, sizes, scale, interpret)

    call = plgpu.kernel(
        kernel,
        out_type=(shape((len(queries), num_features), dtype), *state) if found is None else (),
        scratch_types=places,
        grid=(num_tiles * sizes.num_heads,),
        grid_names=("tile",),
        num_threads=NUM_COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name="expanded_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return call(*given, *(found or ()))


def _kernel(
    read: Read, out: Any, state: State | None, places: dict[str, Any], sizes: Sizes, scale: float, interpret: Interpret
) -> None:
    warpgroup = jax.lax.axis_index("warpgroup")
    num_queries, num_blocks = read.queries.shape[0], read.keys.shape[0] // KEYS
    tile = tile_of(num_queries, num_blocks, read.blocks, read.panel[0], warpgroup)
    has_work = (tile.begin < tile.stop) | (read.panel[0] == 0)  # zeros of queries that see nothing, too

    @pl.when(has_work & (warpgroup == LOADER))
    def _():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        _load(read, tile, places, sizes)

    @pl.when(has_work & (warpgroup != LOADER))
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        plgpu.barrier_wait(places["queries_loaded"].at[warpgroup])
        pl.when(warpgroup == 1)(lambda: _take_turns(places))
        found = _attend(read, tile, state, places, sizes, scale, interpret)
        pl.when(warpgroup == 0)(lambda: _take_turns(places))
        _store(found, read, out, state, tile, places, sizes)


def _load(read: Read, tile: Tile, places: dict[str, Any], sizes: Sizes) -> None:
    """Loads both warpgroups' queries, then blocks into the places in turn, each once both have done with the last."""
    query = sizes.nope + sizes.rope
    for each in range(NUM_COMPUTING):
        rows = pl.ds(tile.rows.start + (each - LOADER) * ROWS, ROWS)
        for what, start, size in (("query_place", 0, sizes.nope), ("query_rotary_place", sizes.nope, sizes.rope)):
            source = read.queries.at[rows, pl.ds(tile.head * query + start, size)]
            plgpu.copy_gmem_to_smem(source, places[what].at[each], places["queries_loaded"].at[each])

    @pl.loop(tile.begin, tile.stop)
    def _(index):
        place = jax.lax.rem(index - tile.begin, jnp.int32(NUM_PLACES))
        is_used = index - tile.begin >= NUM_PLACES
        rows, loaded = pl.ds((index - tile.panel_first) * KEYS, KEYS), places["keys_loaded"].at[place]
        pl.when(is_used)(lambda: plgpu.barrier_wait(places["keys_free"].at[place]))
        source = read.keys.at[rows, pl.ds(tile.head * sizes.nope, sizes.nope)]
        plgpu.copy_gmem_to_smem(source, places["key_places"].at[place], loaded)
        source = read.latents.at[rows, pl.ds(sizes.rank, sizes.rope)]
        plgpu.copy_gmem_to_smem(source, places["rotary_places"].at[place], loaded)
        pl.when(is_used)(lambda: plgpu.barrier_wait(places["values_free"].at[place]))
        source = read.values.at[rows, pl.ds(tile.head * sizes.value, sizes.value)]
        plgpu.copy_gmem_to_smem(source, places["value_places"].at[place], places["values_loaded"].at[place])

    await_all_free(places["keys_free"], tile.stop - tile.begin)
    await_all_free(places["values_free"], tile.stop - tile.begin)


def _take_turns(places: dict[str, Any]) -> None:
    """Until the other warpgroup is there, too: one goes on to products, the other to a softmax."""
    plgpu.barrier_arrive(places["turn"])
    plgpu.barrier_wait(places["turn"])


def _pass_over(tile: Tile, places: dict[str, Any], begin: Any, stop: Any) -> None:
    """Blocks that only the other warpgroup's queries see."""

    @pl.loop(begin, stop)
    def _(index):
        place = jax.lax.rem(index - tile.begin, jnp.int32(NUM_PLACES))
        for what in ("keys", "values"):
            plgpu.barrier_wait(places[f"{what}_loaded"].at[place])
            _take_turns(places)
            plgpu.barrier_arrive(places[f"{what}_free"].at[place])


def _score(places: dict[str, Any], place: Any) -> jax.Array:
    """Before scaling. The other warpgroup's turn begins once the products are under way."""
    own = jax.lax.axis_index("warpgroup")

    def run(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, places["query_place"].at[own], places["key_places"].at[place].T)
        plgpu.wgmma(sums, places["query_rotary_place"].at[own], places["rotary_places"].at[place].T)
        _take_turns(places)
        return sums[...]

    plgpu.barrier_wait(places["keys_loaded"].at[place])
    scores = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((ROWS, KEYS), jnp.float32))
    plgpu.barrier_arrive(places["keys_free"].at[place])
    return scores


def _attend(
    read: Read,
    tile: Tile,
    state: State | None,
    places: dict[str, Any],
    sizes: Sizes,
    scale: float,
    interpret: Interpret,
) -> tuple[Any, Any, Any]:
    """Attention of a warpgroup's queries over the blocks of this panel, and of panels before: not normalised."""
    factor, shape = scale * math.log2(math.e), (ROWS, sizes.value)
    first, stop = (plgpu.load(each.at[tile.rows], layout=OF_ROWS, optimized=False) for each in (read.first, read.stop))

    def mask(index: Any, scores: jax.Array) -> jax.Array:
        keys = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=WIDE) + index * KEYS
        is_seen = (keys >= along_rows(first, (ROWS, KEYS))) & (keys < along_rows(stop, (ROWS, KEYS)))
        return jnp.where(is_seen, scores, -jnp.inf)

    def step(index, carry):
        mixed, peak, total = carry
        place = jax.lax.rem(index - tile.begin, jnp.int32(NUM_PLACES))
        scores = _score(places, place)
        is_whole = (index >= tile.own[2]) & (index < tile.own[3])
        scores = jax.lax.cond(is_whole, lambda: scores, lambda: mask(index, scores))
        higher = jnp.maximum(peak, scores.max(axis=1) * factor)
        decay = jnp.exp2(peak - higher)
        weights = jnp.exp2(scores * factor - along_rows(higher, (ROWS, KEYS)))  # one instruction of both
        total = total * decay + weights.sum(axis=1)
        mixed = mixed * along_rows(decay, shape)
        plgpu.barrier_wait(places["values_loaded"].at[place])
        _take_turns(places)
        mixed = add_product(mixed, weights.astype(jnp.bfloat16), places["value_places"].at[place], interpret)
        plgpu.barrier_arrive(places["values_free"].at[place])
        return mixed, higher, total

    _pass_over(tile, places, tile.begin, tile.own_begin)
    found = jax.lax.fori_loop(tile.own_begin, tile.own_stop, step, _start(tile, state, shape))
    _pass_over(tile, places, tile.own_stop, tile.stop)
    return found


def _start(tile: Tile, state: State | None, shape: tuple[int, int]) -> tuple[Any, Any, Any]:
    """What earlier panels gave; else nothing."""
    if state is None:
        return of_no_keys(shape)
    kept = state

    def load() -> tuple[Any, Any, Any]:
        mixed = kept.mixed.at[tile.rows, pl.ds(tile.head * shape[1], shape[1])]
        peak, total = (each.at[tile.head, tile.rows] for each in kept[1:])
        return (
            plgpu.load(mixed, layout=WIDE, optimized=False),
            plgpu.load(peak, layout=OF_ROWS, optimized=False),
            plgpu.load(total, layout=OF_ROWS, optimized=False),
        )

    goes_on = (tile.own[0] < tile.panel_first) & (tile.own_begin < tile.own_stop)
    return jax.lax.cond(goes_on, load, lambda: of_no_keys(shape))


def _store(
    found: tuple[Any, Any, Any],
    read: Read,
    out: Any,
    state: State | None,
    tile: Tile,
    places: dict[str, Any],
    sizes: Sizes,
) -> None:
    """The result, normalised, once the last panel was seen; else what the next panel goes on with."""
    mixed, peak, total = found
    columns = pl.ds(tile.head * sizes.value, sizes.value)
    is_open = (read.panel[0] == 0) | (tile.own[1] > tile.panel_first)  # not done with before

    @pl.when(is_open & (tile.own[1] <= tile.panel_stop))
    def _():
        stop = plgpu.load(read.stop.at[tile.rows], layout=OF_ROWS, optimized=False)
        inverse = 1 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        values = jnp.where(along_rows(stop, mixed.shape) > 0, mixed * along_rows(inverse, mixed.shape), 0)
        place = places["query_place"].at[jax.lax.axis_index("warpgroup")]
        place[...] = values.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(place, out.at[tile.rows, columns])
        plgpu.wait_smem_to_gmem(0)

    if state is None:
        return
    kept = state

    @pl.when((tile.own[1] > tile.panel_stop) & (tile.own_begin < tile.own_stop))
    def _():
        store(kept.mixed.at[tile.rows, columns], mixed)
        for target, values in zip(kept[1:], (peak, total), strict=True):
            store(target.at[tile.head, tile.rows], values)
