"""Tiles of 64 queries over splits of their contexts: the form of `latent`'s kernel that serves.

Three warpgroups share a tile. One loads keys, 64 at a time, into two places in turn; the other two each compute all
scores, and half of the features of the values: so a softmax has all it needs in one warpgroup's registers, and while
one is at a softmax the other has the tensor cores. Of the products, a third is done twice; `pairs` does not.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moonshard.kv.pages import Pages
from moonshard.models.gpu.tensor_cores import (
    MAX_COLUMNS,
    OF_ROWS,
    WIDE,
    Interpret,
    add_product,
    along_rows,
    await_all_free,
    product,
    store,
)
from moonshard.sharding.arrays import Array, Float, Int

ROWS = KEYS = 64
MAX_RANK = 2 * MAX_COLUMNS
NUM_PLACES = 2  # for keys; with the queries they take 216 of 227 KiB of shared memory
NUM_COMPUTING = 2
LOADER = NUM_COMPUTING  # the last warpgroup
REGISTERS, LOADER_REGISTERS = 232, 40  # of a thread
LEAST = -1e30  # below every score


class Splits(NamedTuple):
    """Attention over each split of the keys, as `models.attention.Partial`, but base 2; of one split the result itself.

    A split that has no keys of a tile's is not written.
    """

    mixed: Float[Array, "splits n rows r"]
    peak: Float[Array, "splits n rows"] | None = None
    total: Float[Array, "splits n rows"] | None = None


def attend_tiles(
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
    """Attention of rows, each a head of a query, in tiles of `ROWS`; those beyond the last query are nobody's."""
    f, tokens_per_copy = queries.shape[2], min(pages.shape[2], KEYS)
    places = {
        "query_place": plgpu.SMEM((ROWS, f), queries.dtype),
        "key_places": plgpu.SMEM((NUM_PLACES, KEYS, f), pages.dtype),
        "queries_loaded": plgpu.Barrier(),
        "loaded": plgpu.Barrier(num_arrivals=KEYS // tokens_per_copy, num_barriers=NUM_PLACES),
        "free": plgpu.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=NUM_PLACES),
    }
    form = TileForm("latent_attention", KEYS, places, _load_keys, _attend)
    task = Task(num_heads, value_rank, scale, num_splits, interpret)
    return launch(form, task, queries, pages, layer, block_tables, positions)


class TileForm(NamedTuple):
    """How three warpgroups share a tile of queries: one loads, the others compute half of the features each."""

    name: str  # of the kernel
    keys_at_once: int  # of a step
    places: Mapping[str, Any]  # in shared memory; `query_place` and `queries_loaded` are among them
    load: Callable[..., None]  # (pages, layer, tables, sequence, first step, last, queries, places)
    attend: Callable[..., tuple[Any, Any, Any]]  # (places, warpgroup, features, visible, first step, last, task)


class Task(NamedTuple):
    """What is the same for all tiles."""

    num_heads: int
    value_rank: int
    scale: float
    num_splits: int
    interpret: Interpret


def launch(
    form: TileForm,
    task: Task,
    queries: Float[Array, "n rows f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
) -> Splits:
    """Runs a form's kernel over all tiles, sequences and splits."""
    n, num_rows, _ = queries.shape

    def kernel(queries, pages, layer, tables, positions, *out, **places):
        _run_tile(form, task, queries, pages, layer, tables, positions, out, places)

    call = plgpu.kernel(
        kernel,
        out_type=splits_of(queries, task.value_rank, task.num_splits),
        scratch_types=form.places,
        grid=(num_rows // ROWS, n, task.num_splits),
        grid_names=("tile", "sequence", "split"),
        num_threads=NUM_COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name=form.name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=task.interpret,
    )
    return Splits(*call(queries, pages, layer.astype(jnp.int32).reshape(1), block_tables, positions))


def splits_of(queries: Float[Array, "n rows f"], value_rank: int, num_splits: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a kernel gives, as `Splits` has it."""
    n, num_rows, _ = queries.shape
    shape = jax.ShapeDtypeStruct
    if num_splits == 1:
        return (shape((1, n, num_rows, value_rank), queries.dtype),)
    each = shape((num_splits, n, num_rows), jnp.float32)
    return shape((num_splits, n, num_rows, value_rank), jnp.float32), each, each


def _run_tile(
    form: TileForm,
    task: Task,
    queries: Any,
    pages: Any,
    layer: Any,
    tables: Any,
    positions: Any,
    out: tuple[Any, ...],
    places: dict[str, Any],
) -> None:
    tile, sequence, split = (jax.lax.axis_index(name) for name in ("tile", "sequence", "split"))
    warpgroup = jax.lax.axis_index("warpgroup")
    rows, own_queries = pl.ds(tile * ROWS, ROWS), queries_of(tile, positions, sequence, task.num_heads)
    each, end = keys_of_split(own_queries, task.num_splits, form.keys_at_once)
    first = split * each
    stop = jnp.minimum(first + each, end)
    features = half_of(task.value_rank, warpgroup)
    epilogue = Epilogue(out, (split, sequence), rows, features, warpgroup)

    @pl.when((first < stop) & (warpgroup == LOADER))
    def _():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        plgpu.copy_gmem_to_smem(queries.at[sequence, rows], places["query_place"], places["queries_loaded"])
        form.load(pages, layer[0], tables, sequence, first, stop, own_queries, places)

    @pl.when((first < stop) & (warpgroup != LOADER))
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        visible = last_visible(tile, own_queries, task.num_heads)
        plgpu.barrier_wait(places["queries_loaded"])
        epilogue.store(*form.attend(places, warpgroup, features, visible, first, stop, task))

    if task.num_splits == 1:
        pl.when((first >= stop) & (warpgroup != LOADER))(epilogue.store_nothing)


def half_of(value_rank: int, which: Any) -> Any:
    """The features of a latent that a computing warpgroup sums."""
    size = value_rank // NUM_COMPUTING
    return pl.ds(which * size, size)


class Epilogue(NamedTuple):
    """Stores a warpgroup's share of a tile once it is computed."""

    out: tuple[Any, ...]  # as `splits_of`
    which: tuple[Any, Any]  # the split and the sequence
    rows: Any
    features: Any
    warpgroup: Any

    def store(self, mixed: Any, peak: Any, total: Any) -> None:
        """Stores the only split normalised, and one of several as it is, with its peaks and totals."""
        target = self.out[0].at[*self.which, self.rows, self.features]
        if len(self.out) == 1:
            inverse = along_rows(1 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny), mixed.shape)
            store(target, (mixed * inverse).astype(self.out[0].dtype))
            return
        store(target, mixed)

        @pl.when(self.warpgroup == 0)
        def _():
            store(self.out[1].at[*self.which, self.rows], peak)
            store(self.out[2].at[*self.which, self.rows], total)

    def store_nothing(self) -> None:
        nothing = jnp.zeros((ROWS, self.features.size), self.out[0].dtype)
        store(self.out[0].at[*self.which, self.rows, self.features], plgpu.layout_cast(nothing, WIDE))


class TileQueries(NamedTuple):
    """The queries of a tile's rows."""

    first: Any
    positions: list[Any]  # of each


def queries_of(tile: Any, positions: Any, sequence: Any, num_heads: int) -> TileQueries:
    """Looks them up; the last of a row of queries stands for those that there are not."""
    count = max(1, ROWS // num_heads) if max(ROWS, num_heads) % min(ROWS, num_heads) == 0 else ROWS // num_heads + 2
    first = jax.lax.div(tile * ROWS, jnp.int32(num_heads))
    last = positions.shape[1] - 1
    return TileQueries(first, [positions[sequence, jnp.minimum(first + each, last)] for each in range(count)])


def keys_of_split(queries: TileQueries, num_splits: int, keys_at_once: int) -> tuple[Any, Any]:
    """The steps of `keys_at_once` keys that a split has, and those of the whole context."""
    end = jax.lax.div(farthest_of(queries) + keys_at_once, jnp.int32(keys_at_once))
    return jax.lax.div(end + (num_splits - 1), jnp.int32(num_splits)), end


def farthest_of(queries: TileQueries) -> Any:
    """The last position that any of them sees."""
    return functools.reduce(jnp.maximum, queries.positions)


def last_visible(tile: Any, queries: TileQueries, num_heads: int) -> jax.Array:
    """The last position that each row sees."""
    rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=OF_ROWS) + tile * ROWS
    visible = jnp.full((ROWS,), -1, jnp.int32)
    for each, position in enumerate(queries.positions):
        start = (queries.first + each) * num_heads
        visible = jnp.where(rows >= start, jnp.broadcast_to(position, (ROWS,)), visible)
    return visible


def _load_keys(
    pages: Any,
    layer: Any,
    tables: Any,
    sequence: Any,
    first: Any,
    stop: Any,
    queries: TileQueries,
    places: dict[str, Any],
) -> None:
    """Loads tiles of keys into the places in turn, each once both that compute have done with the one before."""
    del queries  # all steps have keys

    @pl.loop(first, stop)
    def _(index):
        place = jax.lax.rem(index - first, jnp.int32(NUM_PLACES))
        pieces = pieces_of_keys(pages, layer, tables, sequence, index)  # looked up meanwhile

        @pl.when(index - first >= NUM_PLACES)
        def _():
            plgpu.barrier_wait(places["free"].at[place])

        for source, own in pieces:
            plgpu.copy_gmem_to_smem(source, places["key_places"].at[place, own], places["loaded"].at[place])

    await_all_free(places["free"], stop - first)


def pieces_of_keys(pages: Any, layer: Any, tables: Any, sequence: Any, index: Any) -> list[tuple[Any, Any]]:
    """Where the keys of a tile lie, all of a piece in one block, and which of the tile's rows they are."""
    num_blocks, _, block_size, _ = pages.shape
    count = min(block_size, KEYS)
    found = []
    for start in range(0, KEYS, count):
        position = index * KEYS + start
        column = jnp.minimum(jax.lax.div(position, jnp.int32(block_size)), tables.shape[1] - 1)
        block = jnp.clip(tables[sequence, column], 0, num_blocks - 1)
        offset = jax.lax.rem(position, jnp.int32(block_size)) if block_size > KEYS else 0
        found.append((pages.at[block, layer, pl.ds(offset, count)], pl.ds(start, count)))
    return found


def _attend(
    places: dict[str, Any], warpgroup: Any, features: Any, visible: Any, first: Any, stop: Any, task: Task
) -> tuple[Any, Any, Any]:
    """Attention over tiles of keys from `first` to `stop`: the values' own features, not normalised, peak and total."""
    del warpgroup  # both do the same, but for their features
    factor, shape = task.scale * math.log2(math.e), (ROWS, features.size)

    def step(index, carry):
        mixed, peak, total = carry
        place = jax.lax.rem(index - first, jnp.int32(NUM_PLACES))
        plgpu.barrier_wait(places["loaded"].at[place])
        keys = places["key_places"].at[place]
        scores = product(places["query_place"], keys.T, (ROWS, KEYS)) * factor
        positions = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=WIDE) + index * KEYS
        scores = jnp.where(positions <= along_rows(visible, (ROWS, KEYS)), scores, -jnp.inf)
        higher = jnp.maximum(peak, scores.max(axis=1))
        decay = jnp.exp2(peak - higher)
        weights = jnp.exp2(scores - along_rows(higher, (ROWS, KEYS)))
        total = total * decay + weights.sum(axis=1)
        mixed = mixed * along_rows(decay, shape)
        mixed = add_product(mixed, weights.astype(jnp.bfloat16), keys.at[:, features], task.interpret)
        plgpu.barrier_arrive(places["free"].at[place])
        return mixed, higher, total

    return jax.lax.fori_loop(first, stop, step, of_no_keys(shape))


def of_no_keys(shape: tuple[int, int]) -> tuple[Any, Any, Any]:
    """What a warpgroup has before its first keys: the values' features, peak and total of each row."""
    num_rows, _ = shape
    return (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WIDE),
        plgpu.layout_cast(jnp.full((num_rows,), LEAST, jnp.float32), OF_ROWS),
        plgpu.layout_cast(jnp.zeros((num_rows,), jnp.float32), OF_ROWS),
    )
