"""Experts are placed so that every one is there, copies go where the load is, and devices carry equally much."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.sharding.experts import place_experts


def device_loads(loads: np.ndarray, num_places: int, num_devices: int) -> np.ndarray:
    """[layers, devices], where the copies of an expert share its load equally."""
    placed = place_experts(loads, num_places, num_devices)
    share = loads / placed.num_copies
    per_place = np.take_along_axis(share, placed.expert_of, axis=1)
    return per_place.reshape(len(loads), num_devices, -1).sum(axis=2)


@given(st.data())
def test_every_expert_has_its_copies_where_the_table_says(data: st.DataObject):
    num_devices = data.draw(st.sampled_from([1, 2, 4, 8]))
    num_experts = data.draw(st.integers(1, 24))
    num_redundant = -num_experts % num_devices + num_devices * data.draw(st.integers(0, 3))
    sizes = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    loads = np.array([data.draw(sizes) for _ in range(2)], np.float64)
    placed = place_experts(loads, num_experts + num_redundant, num_devices)
    assert placed.expert_of.shape == (2, num_experts + num_redundant)
    assert (placed.num_copies >= 1).all()
    assert (placed.num_copies.sum(axis=1) == num_experts + num_redundant).all()
    for layer, expert in itertools.product(range(2), range(num_experts)):
        places = placed.places_of[layer, expert]
        assert set(places.tolist()) == set(np.flatnonzero(placed.expert_of[layer] == expert).tolist())
        assert len(set(places[: placed.num_copies[layer, expert]].tolist())) == placed.num_copies[layer, expert]


def test_a_hot_expert_is_copied_and_no_device_carries_more_than_the_others():
    loads = np.array([[900.0, *[100.0] * 15]])
    assert device_loads(loads, 16, 4).max() == 900 + 300
    assert device_loads(loads, 24, 4).max() / device_loads(loads, 24, 4).mean() < 1.1
    assert place_experts(loads, 24, 4).num_copies[0, 0] == 9


def test_copies_of_an_expert_lie_on_different_devices_while_there_are_any():
    placed = place_experts(np.array([[1000.0, 1.0, 1.0, 1.0]]), 8, 4)
    copies = np.flatnonzero(placed.expert_of[0] == 0) // 2
    assert len(copies) == 5
    assert set(copies.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(("num_places", "num_devices"), [(6, 4), (3, 1)])
def test_places_that_do_not_divide_or_do_not_suffice_are_refused(num_places: int, num_devices: int):
    with pytest.raises(ValueError, match=f"{num_places} places on {num_devices} devices for 4 experts"):
        place_experts(np.ones((1, 4)), num_places, num_devices)
