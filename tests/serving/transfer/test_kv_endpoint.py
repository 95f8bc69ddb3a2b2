"""Cells of a partition in a slab of several: they are this partition's, or they are refused."""

import pytest

from moonshard.serving.transfer.endpoint import Endpoint
from moonshard.sharding.layout import Layout

ENDPOINT = Endpoint(
    transport="grpc",
    session="s",
    num_cells=4,
    regions={},
    sessions={},
    layout=Layout(version=1, groups=()),
    fingerprint="f",
)


def test_cells_of_a_partition_are_as_they_were_named():
    assert ENDPOINT.checked([3, 0]).tolist() == [3, 0]
    assert ENDPOINT.checked([]).tolist() == []


@pytest.mark.parametrize("cell", [4, -1])
def test_a_cell_that_would_be_another_partitions_is_refused(cell: int):
    with pytest.raises(ValueError, match="outside of a partition's 4"):
        ENDPOINT.checked([0, cell])
