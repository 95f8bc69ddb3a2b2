"""Paged latent attention for Hopper cards: a key is loaded once for scores and values, by all heads of a query.

It takes the place of `models.attention.latent_attention`, its reference, whose loop over the context has a length that
only the device knows: the host waits in it, and keys are gathered in memory before they are read. The queries of a row
and their heads are cut into tiles of 64; a tile's context is cut into splits, attended apart and merged, where there
are fewer tiles than the card has multiprocessors. How many is decided from shapes; contexts are looked up on the card.
At one query of a row a key's bytes are what costs, from two on its products.
Sources: flash-decoding (pytorch.org/blog/flash-decoding, 2023) for the splits; FlashMLA (DeepSeek, 2025) for which of
the two costs.
"""

import jax.numpy as jnp

from moonshard.kv.pages import Pages
from moonshard.models import attention as reference
from moonshard.models.gpu import card
from moonshard.models.gpu.attention.pairs import PAIR, ROTARY, attend_pairs
from moonshard.models.gpu.attention.splits import merge_splits
from moonshard.models.gpu.attention.tiles import KEYS, MAX_RANK, ROWS, attend_tiles
from moonshard.models.gpu.tensor_cores import Interpret
from moonshard.sharding.arrays import Array, Float, Int

FEATURES = 64  # that a row of shared memory holds, side by side for the tensor cores
OVERHEAD_KEYS = 256  # that an H100 attends to in the time in which a split loads its queries and stores its result
WORTH = 1.1  # by how much more splits must be predicted to be faster
MAX_SPLITS = 128


def latent_attention(
    queries: Float[Array, "n t h f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    value_rank: int,
    scale: float,
    in_pairs: bool = card.ATTENDS_IN_PAIRS,
) -> Float[Array, "n t h r"]:
    """As `models.attention.latent_attention`, which serves, said once, where the kernel does not take these shapes."""
    reason = why_not(queries, pages, value_rank)
    if reason is None:
        how = {"value_rank": value_rank, "scale": scale, "in_pairs": in_pairs}
        return attend(queries, pages, layer, block_tables, positions, **how)
    card.say_once(reason)
    return reference.latent_attention(
        queries, pages, layer, block_tables, positions, value_rank=value_rank, scale=scale
    )


def why_not(queries: Float[Array, "n t h f"], pages: Pages, value_rank: int) -> str | None:
    """What the kernel does not take about these shapes; None: it takes them."""
    block_size, num_features = pages.shape[2:]
    if queries.dtype != jnp.bfloat16 or pages.dtype != jnp.bfloat16:
        return f"attention computes in bfloat16, not {queries.dtype} over pages of {pages.dtype}"
    if block_size % 8 or (KEYS % block_size and block_size % KEYS):
        return f"attention takes blocks that {KEYS} tokens are cut into by 8s, or of {KEYS}s, not of {block_size}"
    if value_rank % (2 * FEATURES) or value_rank > MAX_RANK or num_features % FEATURES:
        return f"attention takes latents of {2 * FEATURES}s up to {MAX_RANK} features, not {value_rank} + rotary"
    return None


def attend(
    queries: Float[Array, "n t h f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    value_rank: int,
    scale: float,
    in_pairs: bool = card.ATTENDS_IN_PAIRS,
    num_splits: int | None = None,
    interpret: Interpret = None,
) -> Float[Array, "n t h r"]:
    """The kernel itself.

    Args:
        in_pairs: by `pairs` where there are as many rotary features as it takes, and not `tiles`.
        num_splits: of each tile's context; None: as the shapes suggest.
        interpret: how to run it on a CPU; None: compile it for a card.
    """
    n, t, h, f = queries.shape
    rows = jnp.pad(queries.reshape(n, t * h, f), ((0, 0), (0, -(t * h) % ROWS), (0, 0)))
    if num_splits is None:
        num_splits = splits_for(n * rows.shape[1] // ROWS, block_tables.shape[1] * pages.shape[2])
    positions = positions.astype(jnp.int32)
    in_pairs = in_pairs and f - value_rank == ROTARY
    found = (attend_pairs if in_pairs else attend_tiles)(
        rows,
        pages,
        layer,
        block_tables.astype(jnp.int32),
        positions,
        num_heads=h,
        value_rank=value_rank,
        scale=scale,
        num_splits=num_splits,
        interpret=interpret,
    )
    if num_splits > 1:
        found = merge_splits(found, positions, h, PAIR if in_pairs else KEYS, queries.dtype, interpret)
    return found.mixed[0, :, : t * h].reshape(n, t, h, value_rank)


def splits_for(num_tiles: int, max_keys: int) -> int:
    """Into how many splits to cut each of the tiles' contexts, which are at most `max_keys` long.

    A card works off as many at a time as it has multiprocessors; a split costs what its keys do, and a constant.
    """

    def cost(splits: int) -> float:
        return -(-num_tiles * splits // num_processors) * (max_keys / splits + OVERHEAD_KEYS)

    num_processors = card.num_processors()
    most = max(1, min(MAX_SPLITS, -(-max_keys // KEYS), 4 * num_processors // num_tiles))
    best = min(cost(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if cost(splits) <= WORTH * best)
