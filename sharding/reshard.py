"""Which byte ranges of KV move from each sender to each receiver: the intersection of their two layouts.

`plan` intersects two layouts once, `expand` applies the plan to the blocks of a request. Nothing else works out where a
value lies. Pure: it needs no device and no transport.

Moving the bytes is a transport's work (`kv.transfer`), and replicating what has landed that of `kv.block_shards`. The
groups of a layout that is planned share their block ids: where a block is one group's alone, plan `Layout.of_group`.
Source: array redistribution by intersecting index ranges, as ScaLAPACK's P_GEMR2D does it (Prylli and Tourancheau
1997).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from moonshard.sharding.layout import (
    GroupLayout,
    Layout,
    Span,
    Tile,
    check_same_blocks,
    extents,
    intersect,
    owners_by_tile,
    sizes,
)

NUM_CACHED_PLANS = 64  # pairs of layouts that a worker meets: its partition against every peer's


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyRuns:
    """Byte ranges to move, one per row; all arrays are int64[n]. Rows of one group and two owners lie together.

    `group` counts the layout's groups. Offsets are into the pages of that group at that owner, or, in a template, into
    one block of them.
    """

    group: np.ndarray
    source_owner: np.ndarray
    source_offset_bytes: np.ndarray
    destination_owner: np.ndarray
    destination_offset_bytes: np.ndarray
    num_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Template:
    """The copies of any one block, and per copy the bytes of a block in the source's and the destination's shard.

    Shared between callers: the arrays are read-only.
    """

    runs: CopyRuns
    source_block_bytes: np.ndarray
    destination_block_bytes: np.ndarray


@lru_cache(maxsize=NUM_CACHED_PLANS)
def plan(source: Layout, destination: Layout) -> Template:
    """The fewest copies that fill every byte of the destination once.

    Owners of the same tile are replicas: a source may have them, and the one that has sent least so far serves the
    next destination; a destination may not, so that no byte is sent twice.

    Raises:
        LayoutMismatch: the layouts describe different blocks, or one side's shards leave a byte out or overlap.
    """
    check_same_blocks(source, destination)
    num_bytes_sent = Counter[int]()
    parts = [
        _plan_group(index, *pair, num_bytes_sent)
        for index, pair in enumerate(zip(source.groups, destination.groups, strict=True))
    ]
    template = Template(
        runs=_join([part.runs for part in parts]),
        source_block_bytes=np.concatenate([part.source_block_bytes for part in parts]),
        destination_block_bytes=np.concatenate([part.destination_block_bytes for part in parts]),
    )
    for column in (*_columns(template.runs), template.source_block_bytes, template.destination_block_bytes):
        column.setflags(write=False)
    return template


@lru_cache(maxsize=NUM_CACHED_PLANS)
def pieces(source: GroupLayout, destination: GroupLayout) -> tuple[Tile, ...]:
    """What one shard of the source and one of the destination have in common, for all pairs: they make up the block.

    Whoever has only some of the shards, on either side, has whole pieces. Raises as `plan` does.
    """
    senders, receivers = owners_by_tile("source", source), owners_by_tile("destination", destination)
    starts, stops = intersect(np.array(list(senders)), np.array(list(receivers)))
    is_shared = (starts < stops).all(axis=-1)
    bounds = zip(starts[is_shared].tolist(), stops[is_shared].tolist(), strict=True)
    return tuple(Tile(*(Span(*span) for span in zip(first, end, strict=True))) for first, end in bounds)


def expand(
    template: Template, source_blocks: Sequence[int] | np.ndarray, destination_blocks: Sequence[int] | np.ndarray
) -> CopyRuns:
    """The copies that move `source_blocks[i]` to `destination_blocks[i]`, joined where blocks adjoin on both sides.

    Block ids count an owner's pages (or a slab's cells) in units of its own shard of a block.

    Raises:
        ValueError: the ids do not pair up, one is negative, or two blocks would land in one place.
    """
    source, destination = _by_destination(source_blocks, destination_blocks)
    # Copies of neighbouring blocks adjoin only where both owners hold the same tile, hence one run is all of a block.
    is_whole = template.source_block_bytes == template.runs.num_bytes
    is_whole &= template.destination_block_bytes == template.runs.num_bytes
    firsts, lengths = _stretches(source, destination)
    whole = _repeat(template, is_whole, source[firsts], destination[firsts], lengths)
    partial = _repeat(template, ~is_whole, source, destination, np.ones_like(source))
    return _join([copies for copies in (whole, partial) if len(copies)] or [whole])


def _plan_group(index: int, source: GroupLayout, destination: GroupLayout, num_bytes_sent: Counter[int]) -> Template:
    senders, receivers = owners_by_tile("source", source), owners_by_tile("destination", destination)
    source_tiles, destination_tiles = np.array(list(senders)), np.array(list(receivers))
    starts, stops = intersect(source_tiles, destination_tiles)
    source_index, destination_index = np.nonzero((starts < stops).all(axis=-1))
    shared = np.stack([starts, stops], axis=-1)[source_index, destination_index]
    source_tiles, destination_tiles = source_tiles[source_index], destination_tiles[destination_index]

    itemsize = source.block.itemsize_bytes
    owners = list(senders.values())
    source_owner = _pick_senders([owners[i] for i in source_index], sizes(shared) * itemsize, num_bytes_sent)
    destination_owner = np.array(list(receivers.values()))[destination_index, 0]
    cut = _cut(shared, source_tiles, destination_tiles)
    return Template(
        runs=CopyRuns(
            group=np.full_like(cut.pair, index),
            source_owner=source_owner[cut.pair],
            source_offset_bytes=_offsets(cut, shared, source_tiles) * itemsize,
            destination_owner=destination_owner[cut.pair],
            destination_offset_bytes=_offsets(cut, shared, destination_tiles) * itemsize,
            num_bytes=cut.num_values * itemsize,
        ),
        source_block_bytes=sizes(source_tiles)[cut.pair] * itemsize,
        destination_block_bytes=sizes(destination_tiles)[cut.pair] * itemsize,
    )


def _pick_senders(candidates: list[list[int]], num_bytes: np.ndarray, num_bytes_sent: Counter[int]) -> np.ndarray:
    """One of each pair's replicas, the least busy; `num_bytes_sent` counts on across groups."""
    picked = list[int]()
    for owners, size in zip(candidates, num_bytes.tolist(), strict=True):
        owner = min(owners, key=num_bytes_sent.__getitem__)
        num_bytes_sent[owner] += size
        picked.append(owner)
    return np.array(picked)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cut:
    """Runs of values, each int64[runs]: of which pair of tiles, at which layer and token of what the two share."""

    pair: np.ndarray
    layer: np.ndarray
    token: np.ndarray
    num_values: np.ndarray


def _cut(shared: np.ndarray, source_tiles: np.ndarray, destination_tiles: np.ndarray) -> _Cut:
    """Cuts what each pair shares, [pairs, 3, 2], into the longest runs contiguous in both shards.

    Tokens adjoin where the pair shares whole rows of both shards, layers where it shares whole layers of both.
    """
    extent = extents(shared)
    is_all = (extent == extents(source_tiles)) & (extent == extents(destination_tiles))
    num_tokens = np.where(is_all[:, 2], 1, extent[:, 1])
    num_layers = np.where(is_all[:, 2] & is_all[:, 1], 1, extent[:, 0])
    num_runs = num_layers * num_tokens
    pair = np.repeat(np.arange(len(shared)), num_runs)
    rank = np.arange(len(pair)) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
    layer, token = np.divmod(rank, num_tokens[pair])
    return _Cut(pair=pair, layer=layer, token=token, num_values=(sizes(shared) // num_runs)[pair])


def _offsets(cut: _Cut, shared: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """Where each run begins in the shard that holds its tile, in values."""
    layer, token, feature = (shared[..., 0] - tiles[..., 0]).T
    _, num_tokens, num_features = extents(tiles).T
    first = (layer * num_tokens + token) * num_features + feature
    return first[cut.pair] + (cut.layer * num_tokens[cut.pair] + cut.token) * num_features[cut.pair]


def _by_destination(
    source_blocks: Sequence[int] | np.ndarray, destination_blocks: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Both sides in ascending order of destination, which joins blocks in whatever order the pool gave them out."""
    source, destination = np.asarray(source_blocks, np.int64), np.asarray(destination_blocks, np.int64)
    if source.shape != destination.shape or source.ndim != 1:
        raise ValueError(f"{source.shape} source blocks do not pair up with {destination.shape} destination blocks")
    order = np.argsort(destination)
    source, destination = source[order], destination[order]
    if len(source) and min(source.min(), destination[0]) < 0:
        raise ValueError("a block id is negative")
    if (np.diff(destination) == 0).any():
        raise ValueError("two blocks would land in one place")
    return source, destination


def _stretches(source: np.ndarray, destination: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First index and length of each stretch of blocks that follow one another on both sides."""
    is_first = np.ones(len(source), bool)
    is_first[1:] = (np.diff(source) != 1) | (np.diff(destination) != 1)
    firsts = np.flatnonzero(is_first)
    return firsts, np.diff(firsts, append=len(source))


def _repeat(
    template: Template, chosen: np.ndarray, source: np.ndarray, destination: np.ndarray, num_blocks: np.ndarray
) -> CopyRuns:
    """The chosen runs of a template at each of the blocks, each run `num_blocks` blocks long."""
    runs, count = template.runs, len(source)
    source_starts = np.multiply.outer(template.source_block_bytes[chosen], source)
    destination_starts = np.multiply.outer(template.destination_block_bytes[chosen], destination)
    source_starts += runs.source_offset_bytes[chosen, None]
    destination_starts += runs.destination_offset_bytes[chosen, None]
    return CopyRuns(
        group=np.repeat(runs.group[chosen], count),
        source_owner=np.repeat(runs.source_owner[chosen], count),
        source_offset_bytes=source_starts.ravel(),
        destination_owner=np.repeat(runs.destination_owner[chosen], count),
        destination_offset_bytes=destination_starts.ravel(),
        num_bytes=np.multiply.outer(runs.num_bytes[chosen], num_blocks).ravel(),
    )


def _columns(copies: CopyRuns) -> list[np.ndarray]:
    return [getattr(copies, field.name) for field in fields(CopyRuns)]


def _join(parts: Sequence[CopyRuns]) -> CopyRuns:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*map(_columns, parts), strict=True)
    return CopyRuns(
        **{field.name: np.concatenate(column) for field, column in zip(fields(CopyRuns), columns, strict=True)}
    )
