"""Cells of a partition in a slab of several: they are this partition's, or they are refused."""

import pytest

from moonshard.serving.transfer.endpoint import Endpoint
from moonshard.sharding.layout import Layout

ENDPOINT = Endpoint(
    transport="grpc", session="s", num_cells=4, regions={}, layout=Layout(version=1, groups=()), fingerprint="f"
)


def test_cells_lie_behind_those_of_the_partitions_before():
    assert ENDPOINT.cells(0, [0, 3]).tolist() == [0, 3]
    assert ENDPOINT.cells(2, [3, 0]).tolist() == [11, 8]
    assert ENDPOINT.cells(1, []).tolist() == []


@pytest.mark.parametrize("cell", [4, -1])
def test_a_cell_that_would_be_another_partitions_is_refused(cell: int):
    with pytest.raises(ValueError, match="outside of a partition's 4"):
        ENDPOINT.cells(1, [0, cell])
