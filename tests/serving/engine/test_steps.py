"""What is packed on the host is what the device program unpacks, bit by bit."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.serving.engine.steps import NOWHERE, Field, StepKind, StepLayout, StepShapes, smallest

pytestmark = pytest.mark.xdist_group("jax")
WITHOUT_HANDOFFS = StepShapes(
    slots_per_partition=3,
    columns_per_sequence=5,
    max_context_tokens=40,
    q_tile=4,
    prefill_buckets=(4, 8, 24),
    decode_buckets=(1, 3),
)
SHAPES = replace(WITHOUT_HANDOFFS, transfer_buckets=(1, 2, 4))
MIXED = StepLayout(
    (
        Field("scalar", ()),
        Field("floats", (2, 3), "float32"),
        Field("none", (0, 4)),
        Field("words", (2, 2), "uint32"),
        Field("ints", (3,)),
    )
)
UNPACK = jax.jit(MIXED.unpack)
EVERY_BITS = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(EVERY_BITS, min_size=MIXED.size, max_size=MIXED.size))
def test_every_bit_pattern_survives_packing_and_unpacking(bits):
    source = np.asarray(bits, np.int32)
    packed, views = MIXED.blank()
    offset = 0
    for field in MIXED.fields:
        views[field.name][0, ...] = source[offset : offset + field.size].view(field.dtype).reshape(field.shape)
        offset += field.size
    np.testing.assert_array_equal(packed, source[None])
    for name, value in UNPACK(packed[0]).items():
        assert value.dtype == views[name].dtype
        assert value.shape == views[name].shape[1:]
        assert np.asarray(value).tobytes() == views[name].tobytes()


def test_special_floats_and_large_words_arrive_as_they_were():
    packed, views = MIXED.blank()
    views["floats"][...] = [[-0.0, np.inf, 1e-38], [np.nan, 0.1, -np.inf]]
    views["words"][...] = [[2**32 - 1, 2**31], [0, 1]]
    values = UNPACK(packed[0])
    np.testing.assert_array_equal(values["floats"], views["floats"][0])
    np.testing.assert_array_equal(values["words"], views["words"][0])


@pytest.mark.parametrize(
    ("kind", "bucket"),
    [
        (StepKind.PREFILL, 8),
        (StepKind.DECODE, 3),
        (StepKind.DRAW, 0),
        (StepKind.LOAD, 0),
        (StepKind.COPY, 0),
        (StepKind.EXPORT, 4),
        (StepKind.LAND, 2),
    ],
)
def test_the_fields_of_a_step_fill_its_metadata_without_overlap(kind, bucket):
    layout = SHAPES.layout(kind, bucket)
    packed, views = layout.blank()
    assert packed.shape == (1, layout.size)
    packed[...] = 0
    assert len(views) == len(layout.fields)
    for view in views.values():
        view.view(np.int32)[...] += 1
    assert (packed == 1).all()


def test_a_blank_decode_or_prefill_step_has_neither_tokens_nor_owners():
    _, decode = SHAPES.layout(StepKind.DECODE, 3).blank()
    _, prefill = SHAPES.layout(StepKind.PREFILL, 8).blank()
    assert (decode["positions"] == -1).all()
    assert (prefill["positions"] == -1).all()
    assert (decode["slot"] == SHAPES.slots_per_partition).all()
    _, draw = SHAPES.layout(StepKind.DRAW).blank()
    assert draw["num_rows"].tolist() == [0]
    assert (draw["sample_slot"] == SHAPES.slots_per_partition).all()
    assert draw["top_p"].tolist() == draw["repetition_penalty"].tolist() == [[1, 1, 1]]


def test_what_is_written_into_a_blank_step_does_not_reach_the_next_one():
    layout = SHAPES.layout(StepKind.DECODE, 3)
    packed, _ = layout.blank()
    expected = packed.copy()
    packed[...] = 7
    np.testing.assert_array_equal(layout.blank()[0], expected)


def test_a_blank_land_step_writes_nowhere():
    _, land = SHAPES.layout(StepKind.LAND, 4).blank()
    assert land["destination"].tolist() == [[NOWHERE] * 4]


def test_a_worker_that_takes_no_part_in_handoffs_has_no_programs_for_them():
    transfers = {(kind, bucket) for kind in (StepKind.EXPORT, StepKind.LAND) for bucket in (1, 2, 4)}
    assert set(SHAPES.programs) - set(WITHOUT_HANDOFFS.programs) == transfers


def test_layouts_follow_their_bucket():
    _, rows = SHAPES.layout(StepKind.DECODE, 1).blank()
    assert {field.shape[0] for field in rows.values()} == {1}
    _, views = SHAPES.layout(StepKind.PREFILL, 24).blank()
    assert views["tokens"].shape == views["positions"].shape == (1, 6, 4)
    assert views["block_tables"].shape == (1, 6, 1, 5)
    assert views["sample_from"].shape == (1, 3)


def test_of_each_kind_the_largest_program_comes_first():
    kinds = [kind for kind, _ in SHAPES.programs]
    for kind, sizes in SHAPES.buckets.items():
        assert SHAPES.programs[kinds.index(kind)] == (kind, sizes[-1])


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 24), (24, 24)])
def test_the_smallest_bucket_that_fits_is_taken(tokens, bucket):
    assert smallest(SHAPES.prefill_buckets, tokens) == bucket
