"""Chunks of prompts as a prefill step has them, and what their queries attend to, in float64."""

import numpy as np

TILE, LAYERS, LAYER, SCALE = 32, 2, 1, 0.3
HUGE = 1e30


def case(
    sequences, *, sizes=(2, 6, 4, 5, 8), tile=TILE, padding_rows=0, block_size=16, seed=0
) -> tuple[np.ndarray, ...]:
    """Chunks of sequences, (first position, number of tokens), in rows of `tile`.

    Blocks are scattered; what no query may see is huge, or no block.

    Args:
        sizes: heads, features of a key without and with rotation, of a value, of a latent.
    """
    rng = np.random.default_rng(seed)
    heads, nope, rope, value, rank = sizes
    columns = 2 + max(start + count for start, count in sequences) // block_size
    pages = np.full((len(sequences) * columns + 2, LAYERS, block_size, rank + rope), HUGE, np.float32)
    blocks, tables, positions = rng.permutation(len(pages)).astype(np.int32), [], []
    for index, (start, count) in enumerate(sequences):
        table = blocks[index * columns : (index + 1) * columns].copy()
        for position in range(start + count):
            pages[table[position // block_size], LAYER, position % block_size] = rng.normal(size=rank + rope)
        table[-(-(start + count) // block_size) :] = rng.choice([-1, len(pages), 2**31 - 1])
        rows = -(-count // tile)
        tables += [table] * rows
        at = np.arange(rows * tile)
        positions += list(np.where(at < count, start + at, -1).reshape(rows, tile))
    tables += [np.zeros(columns, np.int32)] * padding_rows
    positions += [np.full(tile, -1)] * padding_rows
    queries = rng.normal(size=(len(tables), tile, heads, nope + rope)).astype(np.float32)
    k_up, v_up = (rng.normal(size=(heads, own, rank)).astype(np.float32) for own in (nope, value))
    return queries, pages, np.array(LAYER), np.array(tables, np.int32), np.array(positions, np.int32), k_up, v_up


def expected(queries, pages, layer, tables, positions, k_up, v_up) -> np.ndarray:
    """Query by query."""
    (heads, _, rank), rope = k_up.shape, pages.shape[-1] - k_up.shape[2]
    out = np.zeros((*queries.shape[:3], v_up.shape[1]))
    for row, query in np.ndindex(positions.shape):
        seen = np.arange(positions[row, query] + 1)
        if not len(seen):
            continue
        size = pages.shape[2]
        latents = pages[tables[row][seen // size], layer, seen % size].astype(np.float64)
        keys = np.einsum("sr,hkr->hsk", latents[:, :rank], k_up.astype(np.float64))
        rotated = np.broadcast_to(latents[:, rank:], (heads, len(seen), rope))
        scores = np.einsum(
            "hk,hsk->hs", queries[row, query].astype(np.float64), np.concatenate([keys, rotated], axis=2)
        )
        weights = np.exp((scores - scores.max(axis=1, keepdims=True)) * SCALE)
        mixed = weights / weights.sum(axis=1, keepdims=True) @ latents[:, :rank]
        out[row, query] = np.einsum("hr,hvr->hv", mixed, v_up.astype(np.float64))
    return out
