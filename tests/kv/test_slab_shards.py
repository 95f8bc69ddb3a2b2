"""A slab cut as a layout says holds each owner's slices where its region says, and gives whole blocks back."""

import ctypes
import itertools

import numpy as np
import pytest

from moonshard.kv.slab import Slab
from moonshard.kv.slab_shards import SlabShards
from moonshard.kv.transfer import ChecksumMismatch, checksum, copy_verified
from moonshard.sharding.layout import BlockShape, GroupLayout, Layout, tile_group
from moonshard.sharding.reshard import expand, plan

BLOCK = BlockShape(name="kv", dtype="float32", itemsize_bytes=4, block_size=8, num_layers=5, num_features=3)
BLOCK_BYTES = 5 * 8 * 3 * 4
NUM_SLOTS = 4

CUTS = [
    *({"layers_per_stage": stages} for stages in ((5,), (2, 3), (3, 2), (2, 2, 1), (1, 1, 1, 1, 1))),
    *({"num_token_shards": num} for num in (1, 2, 4, 8)),
    *({"layers_per_stage": stages, "num_token_shards": 2, "num_feature_shards": 3} for stages in ((2, 3), (4, 1))),
]
LAYOUTS = [tile_group(BLOCK, **cut) for cut in CUTS]


def blocks(num: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num, BLOCK_BYTES), np.uint8)


def memory(address: int, num_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(int(address)))


@pytest.mark.parametrize("group", LAYOUTS, ids=map(str, CUTS))
def test_each_owner_s_region_holds_its_slices_cell_after_cell(group: GroupLayout):
    slab = Slab(NUM_SLOTS, BLOCK_BYTES)
    shards, sent = SlabShards(slab, group), blocks(NUM_SLOTS)
    for cell, block in enumerate(sent):
        shards.fill_cell(cell, block)
    assert {shard.owner for shard in group.shards} == set(shards.regions)
    whole = sent.view(np.float32).reshape(NUM_SLOTS, 5, 8, 3)
    for shard in group.shards:
        region, tile = shards.regions[shard.owner], shard.tile
        expected = whole[:, slice(*tile.layers), slice(*tile.tokens), slice(*tile.features)]
        found = memory(region.address, NUM_SLOTS * region.cell_bytes)
        assert found.tobytes() == expected.tobytes()
    for cell, block in enumerate(sent):
        out = np.zeros(BLOCK_BYTES, np.uint8)
        shards.copy_cell(cell, out)
        assert out.tobytes() == block.tobytes()


@pytest.mark.parametrize("cells", [(0, 1, 2, 3), (2, 3, 1, 0)])
@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_blocks_copied_between_slabs_of_any_two_layouts_arrive_whole(
    ours: GroupLayout, theirs: GroupLayout, cells: tuple[int, ...]
):
    slabs = Slab(NUM_SLOTS, BLOCK_BYTES), Slab(NUM_SLOTS, BLOCK_BYTES)
    source, destination = SlabShards(slabs[0], ours), SlabShards(slabs[1], theirs)
    sent = blocks(NUM_SLOTS)
    for cell, block in enumerate(sent):
        source.fill_cell(cell, block)
    template = plan(Layout(version=1, groups=(ours,)), Layout(version=1, groups=(theirs,)))
    runs = expand(template, range(NUM_SLOTS), cells)
    assert runs.num_bytes.sum() == sent.size
    for index, num_bytes in enumerate(runs.num_bytes.tolist()):
        start = source.regions[runs.source_owner[index]].address + runs.source_offset_bytes[index]
        stop = destination.regions[runs.destination_owner[index]].address + runs.destination_offset_bytes[index]
        memory(stop, num_bytes)[:] = memory(start, num_bytes)
    private = copy_verified(destination, cells, [checksum(block) for block in sent])
    assert private.tobytes() == sent.tobytes()


def test_a_byte_that_changed_in_any_region_is_found():
    slab = Slab(NUM_SLOTS, BLOCK_BYTES)
    shards, sent = SlabShards(slab, tile_group(BLOCK, layers_per_stage=(2, 3), num_token_shards=2)), blocks(1)
    shards.fill_cell(1, sent[0])
    for region in shards.regions.values():
        last = memory(region.address + 2 * region.cell_bytes - 1, 1)
        last ^= 1
        with pytest.raises(ChecksumMismatch):
            copy_verified(shards, (1,), (checksum(sent[0]),))
        last ^= 1
    assert copy_verified(shards, (1,), (checksum(sent[0]),)).tobytes() == sent.tobytes()


def test_cells_that_are_not_there_or_not_of_a_block_s_size_are_refused():
    shards = SlabShards(Slab(NUM_SLOTS, BLOCK_BYTES), tile_group(BLOCK))
    for cell in (-1, NUM_SLOTS):
        with pytest.raises(IndexError):
            shards.copy_cell(cell, np.zeros(BLOCK_BYTES, np.uint8))
        with pytest.raises(IndexError):
            shards.fill_cell(cell, np.zeros(BLOCK_BYTES, np.uint8))
    with pytest.raises(ValueError, match="slots of 7 bytes"):
        SlabShards(Slab(2, 7), tile_group(BLOCK))
