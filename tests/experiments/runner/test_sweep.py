"""Sweeps expand to what loops would give, in interleaved order; keys survive being flat; mistakes are named."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.common.flat import below, flatten, overridden, unflatten
from moonshard.experiments.runner.sweep import Trial, expand, interleaved, label

NAMES = st.sampled_from(("a", "b", "kv", "max_slots"))
VALUES = st.one_of(st.integers(0, 3), st.text("xy", max_size=2), st.booleans(), st.lists(st.integers(), max_size=2))
TREES = st.recursive(st.dictionaries(NAMES, VALUES, min_size=1), lambda t: st.dictionaries(NAMES, t, min_size=1))
SWEEPS = st.dictionaries(
    st.sampled_from(("server.a", "server.b.c", "workload.d")),
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    max_size=3,
)


@given(TREES)
def test_a_tree_is_the_same_after_having_been_flat(tree: dict[str, Any]):
    assert unflatten(flatten(tree)) == tree


def test_quoted_keys_and_tables_are_the_same():
    assert flatten({"server.decode": {"max_slots": 4}}) == flatten({"server": {"decode.max_slots": 4}})


@pytest.mark.parametrize("flat", [{"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}])
def test_a_key_that_is_value_and_table_is_refused(flat: dict[str, object]):
    with pytest.raises(ValueError, match="a"):
        unflatten(flat)


def test_overrides_are_toml_or_else_text_and_come_last():
    found = overridden({"a.b": 1, "c": 2}, ("a.b=[1, 2]", "a.d=plain words", "e={f=true}", "e.f=false"))
    assert found == {"a.b": [1, 2], "c": 2, "a.d": "plain words", "e.f": False}
    assert below(found, "a") == {"b": [1, 2], "d": "plain words"}


@pytest.mark.parametrize("text", ["a", "=1", ""])
def test_an_override_without_key_or_value_is_refused_as_it_was_typed(text: str):
    with pytest.raises(ValueError, match=f"--set {text}: expected key=value"):
        overridden({}, (text,))


@given(SWEEPS, st.lists(st.integers(0, 9), max_size=3, unique=True))
def test_points_are_what_nested_loops_would_visit(sweep: Mapping[str, list[int]], listed: list[int]):
    expected: list[dict[str, int]] = [{"listed": value} for value in listed] or [{}]
    for key, values in sweep.items():
        expected = [point | {key: value} for point in expected for value in values]
    assert expand(sweep, [{"listed": value} for value in listed]) == expected


@pytest.mark.parametrize(
    ("sweep", "listed", "said"),
    [
        ({"server.a": []}, [], "sweep.server.a: no values"),
        ({"server.a": [1]}, [{"server.a": 2}], "sweep.server.a: the listed points set it too"),
        ({"server.a": [1, 2, 1]}, [], "points 0 and 2 are the same: a=1"),
        ({}, [{"x": 1}, {"x": 1}], "points 0 and 1 are the same: x=1"),
    ],
)
def test_sweeps_that_cannot_be_meant_are_refused(sweep: dict, listed: list, said: str):
    with pytest.raises(ValueError, match=said):
        expand(sweep, listed)


@given(st.integers(1, 6), st.integers(1, 4))
def test_every_point_has_had_its_repeat_before_any_has_its_next(num_points: int, repeats: int):
    trials = list(interleaved(num_points, repeats))
    assert len(set(trials)) == len(trials) == num_points * repeats
    for place, trial in enumerate(trials):
        done = [sum(before.point == point for before in trials[:place]) for point in range(num_points)]
        assert max(done) - min(done) <= 1
        assert trial.repeat == done[trial.point]


def test_folders_of_trials_sort_by_point_and_labels_stay_distinct():
    assert Trial(repeat=1, point=12).name == "point-012-repeat-1"
    assert label({}) == "as configured"
    assert label({"workload.rate_per_s": 2.0, "server.mode": "aggregated"}) == "rate_per_s=2 mode=aggregated"
    assert label({"server.prefill.max_slots": 1, "server.decode.max_slots": 2}) == (
        "server.prefill.max_slots=1 server.decode.max_slots=2"
    )
