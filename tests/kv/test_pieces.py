"""Each of several processes checks what it has of a block, all of that and nothing else, whatever the sender had."""

import itertools

import numpy as np
import pytest

from moonshard.kv.pieces import BlockPieces
from moonshard.kv.slab_shards import own_tile
from moonshard.sharding.layout import BlockShape, GroupLayout, LayoutMismatch, Span, Tile, tile_group
from moonshard.sharding.reshard import pieces

BLOCK = BlockShape(name="kv", dtype="float32", itemsize_bytes=4, block_size=8, num_layers=6, num_features=3)
LAYOUTS = [
    tile_group(BLOCK),
    tile_group(BLOCK, layers_per_stage=(3, 3)),
    tile_group(BLOCK, layers_per_stage=(2, 2, 1, 1)),
    tile_group(BLOCK, num_token_shards=2),
    tile_group(BLOCK, num_token_shards=4),
]
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


def members(group: GroupLayout) -> list[Tile]:
    """What two processes have, with one half of the owners each; one has nothing where there is one owner."""
    owners = [shard.owner for shard in group.shards]
    half = (len(owners) + 1) // 2
    return [own_tile(group, owners[:half]), own_tile(group, owners[half:])]


def part_of(block: np.ndarray, own: Tile) -> np.ndarray:
    part = block[slice(*own.layers), slice(*own.tokens), slice(*own.features)]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def block() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**32, (6, 8, 3), np.uint32)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_what_the_senders_say_of_all_pieces_is_what_the_receivers_find(ours: GroupLayout, theirs: GroupLayout):
    cut, sent = pieces(ours, theirs), block()
    sides = []
    for group in (ours, theirs):
        found = [BlockPieces(BLOCK, own, cut).checksums(part_of(sent, own)) for own in members(group)]
        assert sorted(itertools.chain(*found)) == list(range(len(cut)))  # each piece has one member
        sides.append({piece: value for each in found for piece, value in each.items()})
    assert sides[0] == sides[1]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_any_byte_that_changed_is_found_by_the_member_that_has_it(ours: GroupLayout, theirs: GroupLayout):
    cut = pieces(ours, theirs)
    for own in members(theirs):
        checked, part = BlockPieces(BLOCK, own, cut), part_of(block(), own)
        before = checked.checksums(part)
        for index in range(0, len(part), 5):
            part[index] ^= 1
            assert sum(before[piece] != value for piece, value in checked.checksums(part).items()) == 1
            part[index] ^= 1


def test_no_pieces_are_the_block_as_a_whole():
    assert BlockPieces(BLOCK, BLOCK.tile, ()).checksums(part_of(block(), BLOCK.tile)).keys() == {0}


HALF = Tile(Span(0, 3), Span(0, 8), Span(0, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((), id="the whole block, which is in part elsewhere"),
        pytest.param((Tile(Span(0, 2), Span(0, 8), Span(0, 3)),), id="a layer is missing"),
        pytest.param((HALF, Tile(Span(1, 2), Span(0, 8), Span(0, 3))), id="a layer twice"),
        pytest.param((Tile(Span(0, 4), Span(0, 8), Span(0, 3)),), id="across the edge"),
        pytest.param((Tile(Span(1, 4), Span(0, 8), Span(0, 3)),), id="across the edge, and as large as what is here"),
        pytest.param(
            (Tile(Span(0, 2), Span(0, 8), Span(0, 3)), Tile(Span(1, 2), Span(0, 8), Span(0, 3))),
            id="one twice for one that is missing",
        ),
    ],
)
def test_pieces_that_do_not_make_up_what_is_here_are_refused(wrong: tuple[Tile, ...]):
    with pytest.raises(LayoutMismatch):
        BlockPieces(BLOCK, HALF, wrong)
