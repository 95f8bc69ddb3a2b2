"""How the KV of one partition lies over its devices: which part of every block each owner holds.

An owner is one device's pages, or its region of a slab. It holds half-open ranges over layer, token in block and
feature, stored contiguously in that order (`kv.pages`). A layout only describes: `sharding.reshard` plans the copies
between two of them. It does not say which model the bytes are of (the hash of a block does), nor how owners that hold
the same bytes came to have them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np

Side = Literal["source", "destination"]


class LayoutMismatch(ValueError):
    """No plan joins these layouts; `field` names what differs, or the side whose shards are no tiling of a block."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class Span(NamedTuple):
    """A half-open range of indices."""

    start: int
    stop: int


class Tile(NamedTuple):
    """A part of a block: the product of three ranges."""

    layers: Span
    tokens: Span
    features: Span


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """A whole block of one KV group. `num_features` counts values per token and layer: kv heads times head_dim."""

    name: str
    dtype: str
    itemsize_bytes: int
    block_size: int
    num_layers: int
    num_features: int

    @property
    def tile(self) -> Tile:
        return Tile(Span(0, self.num_layers), Span(0, self.block_size), Span(0, self.num_features))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
    """What one owner holds of every block."""

    owner: int
    tile: Tile


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """How one KV group is shared out; an owner holds at most one shard of a group."""

    block: BlockShape
    shards: tuple[ShardLayout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the KV of one partition is shared out, group by group. `version` is that of the pages' format."""

    version: int
    groups: tuple[GroupLayout, ...]

    def of_group(self, index: int) -> "Layout":
        """One of the groups by itself."""
        return Layout(version=self.version, groups=(self.groups[index],))


def tile_group(
    block: BlockShape,
    *,
    layers_per_stage: Sequence[int] | None = None,
    num_replicas: int = 1,
    num_token_shards: int = 1,
    num_feature_shards: int = 1,
) -> GroupLayout:
    """The regular layouts: one owner by default, pipeline stages, a replicated latent, context parallel, heads.

    Owners are numbered from 0, stage-major, then replica, token shard and feature shard.

    Raises:
        ValueError: the block does not divide so.
    """
    stages = (block.num_layers,) if layers_per_stage is None else tuple(layers_per_stage)
    if sum(stages) != block.num_layers or min(stages, default=0) < 1:
        raise ValueError(f"layers_per_stage = {stages} does not add up to {block.num_layers} layers")
    ends = tuple(itertools.accumulate(stages))
    layers = [Span(end - num_layers, end) for end, num_layers in zip(ends, stages, strict=True)]
    tokens = _even_spans("num_token_shards", block.block_size, num_token_shards)
    features = _even_spans("num_feature_shards", block.num_features, num_feature_shards)
    cells = itertools.product(layers, range(num_replicas), tokens, features)
    shards = [ShardLayout(owner=owner, tile=Tile(ly, tk, ft)) for owner, (ly, _, tk, ft) in enumerate(cells)]
    return GroupLayout(block=block, shards=tuple(shards))


def _even_spans(name: str, size: int, num_shards: int) -> list[Span]:
    if num_shards < 1 or size % num_shards:
        raise ValueError(f"{name} = {num_shards} does not divide {size}")
    step = size // num_shards
    return [Span(start, start + step) for start in range(0, size, step)]


def check_same_blocks(source: Layout, destination: Layout) -> None:
    """LayoutMismatch, naming the first field in which the blocks differ."""
    if source.version != destination.version:
        raise LayoutMismatch("version", f"source {source.version}, destination {destination.version}")
    sent, received = ([group.block for group in layout.groups] for layout in (source, destination))
    names = [[block.name for block in blocks] for blocks in (sent, received)]
    if names[0] != names[1] or not names[0]:
        raise LayoutMismatch("groups", f"source {names[0]}, destination {names[1]}")
    for ours, theirs in zip(sent, received, strict=True):
        for field in fields(BlockShape):
            pair = getattr(ours, field.name), getattr(theirs, field.name)
            if pair[0] != pair[1]:
                raise LayoutMismatch(field.name, f"group {ours.name}: source {pair[0]}, destination {pair[1]}")


def check_alike(side: Side, layout: Layout) -> None:
    """LayoutMismatch unless blocks of all groups are cut in the same way, so that a cell takes any of them."""
    first = layout.groups[0]
    for group in layout.groups[1:]:
        if group.shards != first.shards or replace(group.block, name=first.block.name) != first.block:
            raise LayoutMismatch(side, f"blocks of group {group.block.name} are not cut as those of {first.block.name}")


def owners_by_tile(side: Side, group: GroupLayout) -> dict[Tile, list[int]]:
    """Who holds each tile, in the order of the shards; a source's tile may have several owners.

    Raises:
        LayoutMismatch: the tiles do not make up the block, or a destination's tile has several owners.
    """
    owners = [shard.owner for shard in group.shards]
    if len(set(owners)) != len(owners):
        raise LayoutMismatch(side, f"group {group.block.name}: an owner has two shards in {owners}")
    by_tile: dict[Tile, list[int]] = {}
    for shard in group.shards:
        by_tile.setdefault(shard.tile, []).append(shard.owner)
    if side == "destination" and len(by_tile) != len(owners):
        twice = next(owners for owners in by_tile.values() if len(owners) > 1)
        raise LayoutMismatch(side, f"group {group.block.name}: owners {twice} would receive the same bytes")
    _check_tiling(side, group.block, by_tile)
    return by_tile


def cut_of(tile: Tile, itemsize_bytes: int, within: Tile) -> tuple[slice, slice, slice]:
    """Where a tile lies in the bytes of another that has all of it: [layers, tokens, features * itemsize]."""
    layers, tokens, features = (
        slice(span.start - whole.start, span.stop - whole.start) for span, whole in zip(tile, within, strict=True)
    )
    return layers, tokens, slice(features.start * itemsize_bytes, features.stop * itemsize_bytes)


def bytes_shape(tile: Tile, itemsize_bytes: int) -> tuple[int, int, int]:
    """A tile's bytes, in the order in which an owner has them: layers, tokens, features * itemsize."""
    layers, tokens, features = (span.stop - span.start for span in tile)
    return layers, tokens, features * itemsize_bytes


def _check_tiling(side: Side, block: BlockShape, by_tile: dict[Tile, list[int]]) -> None:
    tiles = np.array(list(by_tile)).reshape(-1, 3, 2)
    limits = np.array(block.tile)
    is_inside = (limits[:, 0] <= tiles[..., 0]) & (tiles[..., 0] < tiles[..., 1]) & (tiles[..., 1] <= limits[:, 1])
    if not is_inside.all():
        outside = list(by_tile)[int(np.argmin(is_inside.all(axis=1)))]
        raise LayoutMismatch(side, f"group {block.name}: {outside} is empty or outside {block.tile}")
    starts, stops = intersect(tiles, tiles)
    is_shared = np.triu((starts < stops).all(axis=-1), k=1)
    if is_shared.any():
        owners = list(by_tile.values())
        first, second = np.argwhere(is_shared)[0]
        raise LayoutMismatch(side, f"group {block.name}: {owners[first]} and {owners[second]} overlap in part")
    num_missing = int(sizes(limits[None]).sum() - sizes(tiles).sum())
    if num_missing:
        raise LayoutMismatch(side, f"group {block.name}: nobody holds {num_missing * block.itemsize_bytes} bytes")


def intersect(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops, each [n, m, 3], of what tiles a[n, 3, 2] and b[m, 3, 2] share; empty where start >= stop."""
    return np.maximum(a[:, None, :, 0], b[None, :, :, 0]), np.minimum(a[:, None, :, 1], b[None, :, :, 1])


def extents(tiles: np.ndarray) -> np.ndarray:
    """The numbers of layers, tokens and features of each tile: [..., 3, 2] to [..., 3]."""
    return tiles[..., 1] - tiles[..., 0]


def sizes(tiles: np.ndarray) -> np.ndarray:
    """The number of values in each tile: [..., 3, 2] to [...]."""
    return extents(tiles).prod(axis=-1)
