"""A table or a model that does not fit is refused by the name of its axis; what fits lies where the table says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.sharding.rules import (
    DECODE,
    MESH_AXES,
    PREFILL,
    MeshError,
    Rules,
    check_rules,
    nearest_divisors,
    shard_shape,
    spec,
)

EXPERTS = ("layers", "experts", None, "expert_ffw", "embed")
SIZES = {"data": 1, "expert": 2, "tensor": 4}


@pytest.mark.parametrize("rules", [PREFILL, DECODE])
def test_the_tables_that_ship_are_sound(rules: Rules):
    check_rules(rules)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": ("expert", "expert")}, r"^rules\.experts names expert twice"),
        ({"heads": ("tensor", "tensor")}, r"^rules\.heads names tensor twice"),
        ({"experts": ("expert", "tensor")}, r"^rules\.expert_ffw: tensor is in rules\.experts too"),
    ],
)
def test_a_table_that_cuts_twice_along_one_axis_is_refused(change: dict[str, tuple[str, ...]], message: str):
    with pytest.raises(MeshError, match=message):
        check_rules(replace(PREFILL, **change))


@pytest.mark.parametrize(
    ("axes", "shape", "rules", "message"),
    [
        (
            ("layers", "heads", None),
            (3, 6, 4),
            PREFILL,
            r"mesh\.tensor = 4 does not divide .* heads dimension 6; 3 or 6 ",
        ),
        (("experts", "embed"), (7, 3), PREFILL, r"mesh\.expert = 2 does not divide .* experts dimension 7; 1 or 7 "),
        (("vocab", "embed"), (3, 3), PREFILL, r"mesh\.tensor = 4 does not divide .* vocab dimension 3; 3 would"),
        (("experts",), (12,), DECODE, r"mesh\.expert x mesh\.tensor = 8 does not .* experts dimension 12; 6 or 12 "),
    ],
)
def test_a_dimension_that_does_not_divide_is_refused_with_what_would(axes, shape, rules: Rules, message: str):
    with pytest.raises(MeshError, match=message):
        spec(axes, shape, SIZES, rules)


def test_a_leaf_is_cut_along_the_axes_of_the_table_and_whole_elsewhere():
    assert spec(EXPERTS, (3, 8, 2, 12, 5), SIZES, PREFILL) == [(), ("expert",), (), ("tensor",), ()]
    assert shard_shape(EXPERTS, (3, 8, 2, 12, 5), SIZES, PREFILL) == (3, 4, 2, 3, 5)
    assert shard_shape(EXPERTS, (3, 8, 2, 12, 5), SIZES, DECODE) == (3, 1, 2, 12, 5)


def test_an_axis_that_no_table_knows_is_an_error():
    with pytest.raises(AttributeError, match="headz"):
        spec(("headz",), (4,), SIZES, PREFILL)


@given(st.integers(1, 500), st.integers(1, 600))
def test_the_nearest_divisors_divide_and_none_lies_between(dimension: int, wanted: int):
    near = nearest_divisors(dimension, wanted)
    assert near
    assert all(dimension % size == 0 for size in near)
    assert not any(dimension % size == 0 for size in range(near[0] + 1, near[-1]) if size not in near)
    if wanted <= dimension:
        assert near[0] <= wanted <= near[-1]


@given(
    st.fixed_dictionaries({axis: st.sampled_from([1, 2, 4]) for axis in MESH_AXES}), st.sampled_from([PREFILL, DECODE])
)
def test_the_parts_of_all_devices_that_differ_make_up_the_whole(sizes: dict[str, int], rules: Rules):
    shape = (3, 16, 2, 32, 5)
    part = shard_shape(EXPERTS, shape, sizes, rules)
    num_parts = sizes["expert"] * sizes["tensor"]
    assert part[1] * part[3] * num_parts == shape[1] * shape[3]
    assert (part[0], part[2], part[4]) == (shape[0], shape[2], shape[4])
