"""However a leaf views a stored matrix and a mesh cuts it, each device has the values of its part and nothing else."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.layout import Layout
from moonshard.models.spec import View

sizes, counts = st.integers(1, 5), st.integers(1, 3)


@st.composite
def views(draw) -> tuple[tuple[int, int], tuple[tuple[int, ...], tuple[slice, ...]] | None, tuple[int, ...]]:
    """A matrix, how a leaf views it, and into how many parts each dimension of the leaf is cut."""
    rows = [draw(counts) * draw(sizes) * draw(st.sampled_from([1, 24, 40, 64]))]
    columns = [draw(counts) * draw(sizes) * draw(st.sampled_from([1, 8, 24, 32]))]
    if draw(st.booleans()):
        rows = [draw(counts) * draw(sizes), *rows]
    if draw(st.booleans()):
        columns = [draw(counts) * draw(sizes), *columns]
    shape = (*rows, *columns)
    part = []
    for size in shape:
        start = draw(st.integers(0, size - 1)) if draw(st.booleans()) else 0
        part.append(slice(start, draw(st.integers(start + 1, size)) if draw(st.booleans()) else size))
    local = [own.stop - own.start for own in part]
    cuts = tuple(draw(st.sampled_from([n for n in range(1, 5) if size % n == 0])) for size in local)
    matrix = (int(np.prod(rows)), int(np.prod(columns)))
    is_plain = len(shape) == 2 and draw(st.booleans())
    if is_plain:
        cuts = tuple(count if size % count == 0 else 1 for count, size in zip(cuts, shape, strict=True))
    return matrix, None if is_plain else (shape, tuple(part)), cuts


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60)
@given(given_view=views(), seed=st.integers(0, 2**32))
def test_each_device_has_the_values_of_its_part_of_the_view(name, given_view, seed):
    matrix, seen, cuts = given_view
    view = None if seen is None else View(shape=seen[0], part=seen[1])
    format = FORMATS[name]
    assume(matrix[0] * matrix[1] < 500_000)
    values, scales = format.quantise(np.random.default_rng(seed).standard_normal(matrix).astype(np.float32))
    layout = Layout.of(format, matrix, view, cuts)
    if layout is None:  # a packed word would be cut
        reject()
    whole = format.dequantise(values, scales, matrix[1]).astype(np.float32)
    if view is not None:
        whole = whole.reshape(view.shape)[view.part]
    assert layout.shape == whole.shape
    for device in itertools.product(*map(range, cuts)):
        own_values, own_scales, own = (
            tuple(
                slice(size // count * index, size // count * (index + 1))
                for size, count, index in zip(shape, cuts, device, strict=True)
            )
            for shape in (layout.values_shape, layout.scales_shape, layout.shape)
        )
        found = format.dequantise(
            layout.values(values, own_values),
            layout.scales(scales, own_scales),
            whole[own].shape[-1],
            layout.block,
        )
        np.testing.assert_array_equal(found.astype(np.float32), whole[own])


@pytest.mark.parametrize("name", FORMATS)
def test_a_leaf_that_nothing_cuts_has_the_stored_tensors_as_they_are(name):
    format, matrix = FORMATS[name], (200, 300)
    values, scales = format.quantise(np.random.default_rng(0).standard_normal(matrix).astype(np.float32))
    layout = Layout.of(format, matrix, None, (1, 1))
    assert layout is not None
    everything = (slice(None), slice(None))
    assert np.shares_memory(layout.values(values, everything), values)
    np.testing.assert_array_equal(layout.scales(scales, everything), scales)
    assert layout.block == format.block(300)


@pytest.mark.parametrize(("num_parts", "block"), [(2, 32), (4, 16), (8, 8), (16, None)])
def test_a_cut_through_a_group_makes_groups_smaller_and_one_through_a_word_is_refused(num_parts, block):
    layout = Layout.of(FORMATS["int4"], (16, 64), None, (1, num_parts))
    assert (layout and layout.block) == (block and (1, block))


def test_the_smallest_head_that_a_block_covers_several_of_has_its_own_scale():
    """K2's queries: heads of 192 rows, in blocks of 128."""
    layout = Layout.of(FORMATS["fp8"], (64 * 192, 1536), View(shape=(64, 192, 1536)), (8, 1, 1))
    assert layout is not None
    assert layout.block == (1, 64, 128)
    assert layout.scales_shape == (64, 3, 12)
