"""Slabs: aligned cells that tile them; cells outside, and slabs without bytes or larger than memory, are refused."""

import pytest

from moonshard.kv.slab import ALIGNMENT_BYTES, Slab, SlabTooLarge, find_slab


@pytest.mark.parametrize(("num_cells", "cell_bytes"), [(1, 1), (3, 100), (5, 4096), (7, 70_000)])
def test_a_slab_is_aligned_and_its_cells_tile_it(num_cells: int, cell_bytes: int):
    slab = Slab(num_cells, cell_bytes)
    assert slab.address % ALIGNMENT_BYTES == 0
    for index in range(num_cells):
        assert slab.cell(index).ctypes.data == slab.cell_address(index) == slab.address + index * cell_bytes
        slab.cell(index)[:] = index + 1
    assert slab.bytes.tolist() == [index + 1 for index in range(num_cells) for _ in range(cell_bytes)]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_cell_outside_is_refused(index: int):
    slab = Slab(3, 16)
    with pytest.raises(IndexError, match=f"slot {index} of 3"):
        slab.cell(index)
    with pytest.raises(IndexError):
        slab.cell_address(index)


@pytest.mark.parametrize(("num_cells", "cell_bytes"), [(0, 16), (4, 0)])
def test_a_slab_without_bytes_is_refused(num_cells: int, cell_bytes: int):
    with pytest.raises(ValueError, match="slots with bytes"):
        Slab(num_cells, cell_bytes)


def test_a_slab_larger_than_the_memory_there_is_names_both():
    assert Slab(4, 1000, available_bytes=4000).num_bytes == 4000
    with pytest.raises(SlabTooLarge, match=r"3 slots of 1073741824 bytes takes 3\.00 GiB, and 2\.50 GiB"):
        Slab(3, 1024**3, available_bytes=5 * 1024**3 // 2)


@pytest.mark.parametrize(
    ("offset", "num_bytes", "is_inside"),
    [(0, 64, True), (63, 1, True), (-1, 1, False), (64, 1, False), (0, 65, False), (32, 33, False)],
)
def test_only_a_range_that_lies_inside_whole_is_covered(offset: int, num_bytes: int, is_inside: bool):
    slab = Slab(4, 16)
    assert slab.covers(slab.address + offset, num_bytes) == is_inside
    assert find_slab([Slab(1, 8), slab], slab.address + offset, num_bytes) is (slab if is_inside else None)
