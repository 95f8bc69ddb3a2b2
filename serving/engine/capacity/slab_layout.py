"""How a worker's slab holds blocks: which device of a partition has which part of a block's layers and tokens."""

import itertools
from collections.abc import Sequence

from moonshard.models.spec import KvGroup
from moonshard.sharding.layout import BlockShape, GroupLayout, Layout, tile_group
from moonshard.sharding.shard import ALONE, Shard

LAYOUT_VERSION = 1  # of the pages' format: block-major, [layers, tokens, features] within a shard


def slab_layout(
    groups: Sequence[KvGroup], block_size: int, shard: Shard = ALONE, layers_per_stage: Sequence[int] | None = None
) -> Layout:
    """How a worker's slab holds blocks: an owner for each device of a partition, and no byte twice.

    Any block may be of any group, so all of them are cut alike: `layers_per_stage` are those of a block
    (`page_layers`), by default in one stage.

    Context-parallel, an owner has the tokens that its pages have. Else every device needs the whole block: each
    receives some of the layers, and they gather the rest from one another. Layers, because a layer's bytes lie
    together.
    """
    num_owners, layers = shard.mesh.tensor, layers_per_stage or [max(group.num_layers for group in groups)]
    is_token_cut = bool(shard.axes("kv_tokens"))
    blocks = [
        BlockShape(
            name=group.name,
            dtype=group.dtype,
            itemsize_bytes=group.itemsize_bytes,
            block_size=block_size,
            num_layers=sum(layers),
            num_features=group.num_features,
        )
        for group in groups
    ]
    groups_cut = (
        tile_group(block, layers_per_stage=layers, num_token_shards=num_owners)
        if is_token_cut
        else tile_group(block, layers_per_stage=_layers_per_owner(layers, num_owners))
        for block in blocks
    )
    return Layout(version=LAYOUT_VERSION, groups=tuple(groups_cut))


def owners_by_stage(group: GroupLayout, layers_per_stage: Sequence[int]) -> list[list[int]]:
    """Of each stage the owners of its layers, in the order of the devices that carry their parts.

    Devices that are behind these carry nothing.
    """
    ends = list(itertools.accumulate(layers_per_stage))
    spans = zip([0, *ends], ends, strict=False)
    return [[s.owner for s in group.shards if start <= s.tile.layers.start < end] for start, end in spans]


def _layers_per_owner(layers_per_stage: Sequence[int], num_owners: int) -> list[int]:
    """The layers of each stage in equal shares, the last of them smaller or absent, as `kv.block_shards` cuts them."""
    found = []
    for num_layers in layers_per_stage:
        share = -(-num_layers // num_owners)
        found += [min(share, num_layers - start) for start in range(0, num_layers, share)]
    return found
