"""Resharding against direct slicing of the whole: copies are applied to byte buffers, nothing else moves."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.sharding.layout import (
    BlockShape,
    GroupLayout,
    Layout,
    LayoutMismatch,
    ShardLayout,
    Span,
    Tile,
    tile_group,
)
from moonshard.sharding.reshard import CopyRuns, expand, plan

NUM_BLOCKS = 6  # in every owner's pages
K2 = BlockShape(name="latent", dtype="bfloat16", itemsize_bytes=2, block_size=64, num_layers=61, num_features=576)
SMALL = BlockShape(name="latent", dtype="bfloat16", itemsize_bytes=2, block_size=4, num_layers=6, num_features=8)
OTHER = BlockShape(name="window", dtype="float32", itemsize_bytes=4, block_size=4, num_layers=2, num_features=6)


OwnedTiles = list[tuple[int, Tile]]


def layout_of(*groups: GroupLayout) -> Layout:
    return Layout(version=1, groups=groups)


def group_of(block: BlockShape, owned: OwnedTiles) -> GroupLayout:
    return GroupLayout(block=block, shards=tuple(ShardLayout(owner=owner, tile=tile) for owner, tile in owned))


@st.composite
def cuts(draw: st.DrawFn, tile: Tile, depth: int = 3) -> list[Tile]:
    """A block cut in two along some axis, each part cut on."""
    axes = [axis for axis, (start, stop) in enumerate(tile) if stop - start > 1]
    if depth == 0 or not axes or draw(st.booleans()):
        return [tile]
    axis = draw(st.sampled_from(axes))
    start, stop = tile[axis]
    middle = draw(st.integers(start + 1, stop - 1))
    halves = [tile._replace(**{Tile._fields[axis]: span}) for span in (Span(start, middle), Span(middle, stop))]
    return [part for half in halves for part in draw(cuts(half, depth - 1))]


@st.composite
def owned_tiles(draw: st.DrawFn, block: BlockShape, *, max_replicas: int) -> OwnedTiles:
    num_replicas = st.integers(1, max_replicas)
    tiles = [tile for tile in draw(cuts(block.tile)) for _ in range(draw(num_replicas))]
    owners = draw(st.permutations(range(len(tiles) + 2)))
    return list(zip(owners, tiles, strict=False))


def owned_pairs(block: BlockShape) -> st.SearchStrategy[tuple[OwnedTiles, OwnedTiles]]:
    return st.tuples(owned_tiles(block, max_replicas=3), owned_tiles(block, max_replicas=1))


# Strategies draw what layouts are made of, not layouts: the type checks of these draw random numbers of their own.
pairs_by_block = st.fixed_dictionaries({SMALL: owned_pairs(SMALL)}, optional={OTHER: owned_pairs(OTHER)})
PairsByBlock = dict[BlockShape, tuple[OwnedTiles, OwnedTiles]]


def layouts_of(drawn: PairsByBlock) -> tuple[Layout, Layout]:
    source = (group_of(block, owned) for block, (owned, _) in drawn.items())
    destination = (group_of(block, owned) for block, (_, owned) in drawn.items())
    return layout_of(*source), layout_of(*destination)


@st.composite
def block_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    num_moved = draw(st.integers(0, NUM_BLOCKS))
    ids = st.permutations(range(NUM_BLOCKS)) | st.just(list(range(NUM_BLOCKS)))
    return draw(ids)[:num_moved], draw(ids)[:num_moved]


def whole_blocks(block: BlockShape) -> np.ndarray:
    """Bytes of NUM_BLOCKS blocks, [blocks, layers, tokens, feature bytes]."""
    shape = (NUM_BLOCKS, block.num_layers, block.block_size, block.num_features * block.itemsize_bytes)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def pages_of(tile: Tile, whole: np.ndarray, itemsize_bytes: int) -> np.ndarray:
    """What the owner of a tile stores of the blocks, as one row of bytes per block."""
    layers, tokens, features = (slice(*span) for span in tile)
    feature_bytes = slice(features.start * itemsize_bytes, features.stop * itemsize_bytes)
    return np.ascontiguousarray(whole[:, layers, tokens, feature_bytes]).reshape(len(whole), -1)


def all_pages(layout: Layout, wholes: list[np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
    """Every owner's pages, by group and owner."""
    return {
        (index, shard.owner): pages_of(shard.tile, wholes[index], group.block.itemsize_bytes)
        for index, group in enumerate(layout.groups)
        for shard in group.shards
    }


def rows(copies: CopyRuns) -> list[tuple[int, int, int, int, int, int]]:
    columns = (
        copies.group,
        copies.source_owner,
        copies.source_offset_bytes,
        copies.destination_owner,
        copies.destination_offset_bytes,
        copies.num_bytes,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def num_joinable(copies: CopyRuns) -> int:
    """Pairs of copies that continue one another on both sides."""
    ends = {(g, s, s_at + n, d, d_at + n) for g, s, s_at, d, d_at, n in rows(copies)}
    return sum((g, s, s_at, d, d_at) in ends for g, s, s_at, d, d_at, _ in rows(copies))


@given(pairs_by_block, block_pairs())
def test_copies_equal_slicing_and_write_every_byte_of_the_moved_blocks_once(
    drawn: PairsByBlock, blocks: tuple[list[int], list[int]]
):
    source, destination = layouts_of(drawn)
    moved_from, moved_to = blocks
    sent = [whole_blocks(group.block) for group in source.groups]
    landed = [np.zeros_like(whole) for whole in sent]
    for whole, pages in zip(sent, landed, strict=True):
        pages[moved_to] = whole[moved_from]
    theirs, expected = all_pages(source, sent), all_pages(destination, landed)
    ours = {key: np.zeros_like(pages) for key, pages in expected.items()}
    num_writes = {key: np.zeros(pages.shape, int) for key, pages in expected.items()}

    for group, sender, read_at, receiver, write_at, size in rows(expand(plan(source, destination), *blocks)):
        read = theirs[group, sender].reshape(-1)[read_at : read_at + size]
        ours[group, receiver].reshape(-1)[write_at : write_at + size] = read
        num_writes[group, receiver].reshape(-1)[write_at : write_at + size] += 1

    is_moved = np.isin(np.arange(NUM_BLOCKS), moved_to)
    for key in expected:
        np.testing.assert_array_equal(ours[key], expected[key])
        assert (num_writes[key] == is_moved[:, None]).all()


@given(pairs_by_block, block_pairs())
def test_no_two_copies_can_be_joined(drawn: PairsByBlock, blocks: tuple[list[int], list[int]]):
    template = plan(*layouts_of(drawn))
    assert num_joinable(template.runs) == 0
    assert num_joinable(expand(template, *blocks)) == 0


@given(owned_tiles(SMALL, max_replicas=1))
def test_equal_layouts_send_each_shard_whole_and_only_to_its_like(owned: OwnedTiles):
    layout = layout_of(group_of(SMALL, owned))
    template = plan(layout, layout)
    assert len(template.runs) == len(owned)
    assert template.runs.source_owner.tolist() == template.runs.destination_owner.tolist()
    assert len(expand(template, [5, 1, 3], [2, 0, 4])) == 3 * len(owned)
    assert len(expand(template, [3, 4, 1], [0, 1, 5])) == 2 * len(owned)


def test_blocks_that_adjoin_are_joined_in_whatever_order_they_are_named():
    layout = layout_of(tile_group(SMALL))
    copies = expand(plan(layout, layout), [3, 5, 4], [0, 2, 1])
    size = 6 * 4 * 8 * 2
    assert rows(copies) == [(0, 0, 3 * size, 0, 0, 3 * size)]


def test_no_blocks_are_no_copies():
    layout = layout_of(tile_group(SMALL))
    assert len(expand(plan(layout, layout), [], [])) == 0


@pytest.mark.parametrize(
    ("source", "destination", "num_runs"),
    [
        ({"num_token_shards": 4}, {"num_token_shards": 4}, 4),  # one range per shard
        ({"layers_per_stage": (1, 5)}, {"layers_per_stage": (4, 2)}, 3),  # one per pair of stages that share layers
        ({}, {"num_token_shards": 2}, 2 * 6),  # one per layer
        ({"num_feature_shards": 2}, {"num_feature_shards": 4}, 4 * 6 * 4),  # one per token and layer
        ({"layers_per_stage": (1, 5)}, {"num_token_shards": 2}, 2 * 6),
        ({"num_feature_shards": 2}, {"num_feature_shards": 2, "num_token_shards": 2}, 2 * 2 * 6),
    ],
)
def test_regular_layouts_take_as_few_runs_as_they_can(source: dict, destination: dict, num_runs: int):
    template = plan(layout_of(tile_group(SMALL, **source)), layout_of(tile_group(SMALL, **destination)))
    assert len(template.runs) == num_runs


def test_heads_go_to_the_owner_of_the_same_heads():
    heads, head_dim = 4, 2
    per_head = layout_of(tile_group(SMALL, num_feature_shards=heads))
    template = plan(per_head, layout_of(tile_group(SMALL, num_feature_shards=2)))
    pairs = set(zip(template.runs.source_owner.tolist(), template.runs.destination_owner.tolist(), strict=True))
    assert pairs == {(0, 0), (1, 0), (2, 1), (3, 1)}
    assert set(template.runs.num_bytes.tolist()) == {head_dim * SMALL.itemsize_bytes}


@pytest.mark.parametrize("num_destinations", [1, 2, 4])
def test_replicas_share_the_sending(num_destinations: int):
    replicated = layout_of(tile_group(SMALL, num_replicas=2))
    template = plan(replicated, layout_of(tile_group(SMALL, num_token_shards=num_destinations)))
    num_bytes = np.bincount(template.runs.source_owner, template.runs.num_bytes, minlength=2)
    per_destination = 6 * 4 * 8 * 2 // num_destinations
    assert max(num_bytes) - min(num_bytes) == (per_destination if num_destinations == 1 else 0)


def test_replicas_share_the_sending_across_groups():
    replicated = layout_of(*(tile_group(block, num_replicas=2) for block in (SMALL, OTHER)))
    template = plan(replicated, layout_of(tile_group(SMALL), tile_group(OTHER)))
    assert set(template.runs.source_owner.tolist()) == {0, 1}


def test_owners_are_numbered_stage_by_stage():
    group = tile_group(SMALL, layers_per_stage=(1, 5), num_replicas=2, num_token_shards=2)
    layers = [shard.tile.layers for shard in group.shards]
    tokens = [shard.tile.tokens for shard in group.shards]
    assert [shard.owner for shard in group.shards] == list(range(8))
    assert layers == [Span(0, 1)] * 4 + [Span(1, 6)] * 4
    assert tokens == [Span(0, 2), Span(2, 4)] * 4


def test_a_plan_is_made_once_and_cannot_be_written():
    source, destination = layout_of(tile_group(SMALL)), layout_of(tile_group(SMALL, num_token_shards=2))
    template = plan(source, destination)
    assert plan(layout_of(tile_group(SMALL)), destination) is template
    with pytest.raises(ValueError, match="read-only"):
        template.runs.num_bytes[0] = 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float32"), ("itemsize_bytes", 1), ("block_size", 8), ("num_layers", 7), ("num_features", 9)],
)
def test_blocks_that_differ_are_refused_by_field(field: str, value: str | int):
    theirs = dataclasses.replace(SMALL, **{field: value})
    with pytest.raises(LayoutMismatch, match=f"^{field}: group latent: source {getattr(SMALL, field)}") as raised:
        plan(layout_of(tile_group(SMALL)), layout_of(tile_group(theirs)))
    assert raised.value.field == field


def test_versions_and_groups_that_differ_are_refused():
    ours = layout_of(tile_group(SMALL))
    with pytest.raises(LayoutMismatch, match=r"^version: source 1, destination 2") as raised:
        plan(ours, dataclasses.replace(ours, version=2))
    assert raised.value.field == "version"
    for theirs in (layout_of(tile_group(SMALL), tile_group(OTHER)), layout_of(tile_group(OTHER)), layout_of()):
        with pytest.raises(LayoutMismatch, match=r"^groups: ") as raised:
            plan(ours, theirs)
        assert raised.value.field == "groups"


FRONT, BACK = SMALL.tile._replace(layers=Span(0, 2)), SMALL.tile._replace(layers=Span(2, 6))


@pytest.mark.parametrize(
    ("tiles", "fault"),
    [
        ([], "nobody holds 384 bytes"),
        ([FRONT], "nobody holds 256 bytes"),
        ([FRONT, BACK, BACK._replace(layers=Span(5, 6))], r"\[1\] and \[2\] overlap in part"),
        ([FRONT, BACK._replace(layers=Span(2, 7))], "outside"),
        ([FRONT, BACK, BACK._replace(layers=Span(3, 3))], "empty"),
        ([FRONT, BACK._replace(features=Span(-1, 8))], "outside"),
    ],
)
def test_shards_that_are_no_tiling_are_refused_on_either_side(tiles: list[Tile], fault: str):
    good, bad = layout_of(tile_group(SMALL)), layout_of(group_of(SMALL, list(enumerate(tiles))))
    for side, layouts in {"source": (bad, good), "destination": (good, bad)}.items():
        with pytest.raises(LayoutMismatch, match=fault) as raised:
            plan(*layouts)
        assert raised.value.field == side


def test_a_destination_has_no_replicas():
    replicated = layout_of(tile_group(SMALL, num_replicas=2))
    with pytest.raises(LayoutMismatch, match=r"owners \[0, 1\] would receive the same bytes") as raised:
        plan(layout_of(tile_group(SMALL)), replicated)
    assert raised.value.field == "destination"


def test_an_owner_has_one_shard_of_a_group():
    twice = layout_of(group_of(SMALL, [(3, FRONT), (3, BACK)]))
    with pytest.raises(LayoutMismatch, match="two shards"):
        plan(twice, layout_of(tile_group(SMALL)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers_per_stage": (1, 4)},
        {"layers_per_stage": (0, 6)},
        {"layers_per_stage": ()},
        {"num_token_shards": 3},
        {"num_feature_shards": 16},
        {"num_token_shards": 0},
    ],
)
def test_a_block_that_does_not_divide_is_refused_by_name(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tile_group(SMALL, **wrong)


@pytest.mark.parametrize(
    ("source", "destination", "fault"),
    [
        ([1], [1, 2], "do not pair up"),
        (np.array([[1]]), np.array([[2]]), "do not pair up"),
        ([1, 2], [3, 3], "one place"),
        ([-1, 2], [0, 1], "negative"),
        ([1, 2], [-1, 0], "negative"),
    ],
)
def test_blocks_that_cannot_be_moved_are_refused(
    source: list[int] | np.ndarray, destination: list[int] | np.ndarray, fault: str
):
    layout = layout_of(tile_group(SMALL))
    with pytest.raises(ValueError, match=fault):
        expand(plan(layout, layout), source, destination)


def test_one_source_block_may_land_in_several_places():
    layout = layout_of(tile_group(SMALL))
    copies = expand(plan(layout, layout), [2, 2], [0, 3])
    assert copies.source_offset_bytes.tolist() == [2 * 384, 2 * 384]


def test_a_block_of_k2_takes_one_run_per_layer_and_token_shard():
    stages = layout_of(tile_group(K2, layers_per_stage=(8, 8, 8, 8, 8, 7, 7, 7)))
    template = plan(stages, layout_of(tile_group(K2, num_token_shards=8)))
    assert len(template.runs) == 61 * 8
    assert int(template.runs.num_bytes.sum()) == 61 * 64 * 576 * 2
