"""No other contiguous split of the layers has a lighter heaviest stage."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.sharding.stages import split_layers


def heaviest(costs: list[float], counts: tuple[int, ...], before: float, after: float) -> float:
    ends = list(itertools.accumulate(counts))
    stages = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    stages[0] += before
    stages[-1] += after
    return max(stages)


COSTS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=8)


@given(COSTS, st.integers(1, 5), st.integers(0, 9).map(float), st.integers(0, 9).map(float))
def test_the_heaviest_stage_is_the_lightest_there_is(costs: list[float], num_stages: int, before: float, after: float):
    if num_stages > len(costs):
        with pytest.raises(ValueError, match="layers cannot make"):
            split_layers(costs, num_stages, before=before, after=after)
        return
    found = split_layers(costs, num_stages, before=before, after=after)
    assert sum(found) == len(costs)
    assert len(found) == num_stages
    assert min(found) >= 1
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    others = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts]
    assert heaviest(costs, found, before, after) == min(heaviest(costs, each, before, after) for each in others)


def test_a_light_first_layer_makes_the_first_stage_longer():
    assert split_layers([1.0, *[4.0] * 6], 2) == (4, 3)


def test_of_splits_as_good_the_evener_is_taken():
    assert split_layers([1.0] * 4, 2, before=1.0) == (2, 2)
