"""The bench of tiers: each way really moves the blocks, and the table says from which length it is worth it."""

from pathlib import Path

import pytest

from moonshard.experiments.bench.tiers.record import Moved, TierTimes
from moonshard.experiments.bench.tiers.table import shortest_worth_it, tiers_grid
from moonshard.experiments.bench.tiers.ways import move

WAYS = {"memcpy", "host", "store", "ssd", "ssd, uncached", "ssd, O_DIRECT"}


@pytest.mark.xdist_group("mooncake")
def test_every_way_is_timed_for_every_number_of_blocks(tmp_path: Path):
    found = move(block_bytes=10_000, num_blocks=(1, 3), repeats=2, folder=tmp_path, seed=0)
    assert {(one.way, one.num_blocks) for one in found} == {(way, number) for way in WAYS for number in (1, 3)}
    assert all(len(one.put_s) == len(one.get_s) == 2 for one in found)
    assert all(0 < seconds < 60 for one in found for seconds in (*one.put_s, *one.get_s))


def times(get_s: dict[int, float]) -> TierTimes:
    return TierTimes(
        block_tokens=64,
        block_bytes=1_000_000,
        moved=tuple(
            Moved(way="ssd", num_blocks=number, put_s=(0.002,) * 3, get_s=(seconds, 9.0, 0.0))
            for number, seconds in get_s.items()
        ),
        land_s=dict.fromkeys(get_s, (0.5,)),
        compute_s={number: (1.0 * number,) for number in get_s},
    )


@pytest.mark.parametrize(
    ("get_s", "expected"),
    [
        ({1: 0.4, 2: 0.4}, 64),
        ({1: 0.6, 2: 0.6}, 128),
        ({1: 0.4, 2: 1.6, 4: 0.4}, 256),  # the shortest beyond which it is never worse
        ({1: 0.6, 2: 1.6}, None),
    ],
)
def test_the_shortest_length_that_is_worth_it_counts_getting_and_landing(get_s: dict[int, float], expected: int | None):
    assert shortest_worth_it(times(get_s), "ssd") == expected


def test_the_table_has_gigabytes_a_second_beside_computing():
    grid = tiers_grid(times({2: 0.5}))
    by_way = {row[2]: dict(zip(grid.columns, row, strict=True)) for row in grid.rows}
    assert by_way["ssd"]["put, GB/s"] == "1.00"
    assert by_way["ssd"]["of computing"] == "0.500"
    assert by_way["computed"]["get, GB/s"] == "0.001"
    assert grid.notes[-1].endswith("ssd 128.")
    assert tiers_grid(None).rows == ()
