"""The best arm does most, or is the steadiest of those that repeats do not tell from it; and bars are judged so too."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.common.intervals import Interval
from moonshard.experiments.reading.pictures.bars import judged, told
from moonshard.experiments.reading.tables.best import Arm, best_arm, best_table


def arm(name: str, values: list[float], gap_ms: float) -> Arm:
    return Arm(name=name, values=dict(enumerate(values)), gap_ms=gap_ms)


def best_and_tied(*arms: Arm) -> tuple[str, list[str]]:
    best, tied = best_arm(arms)
    return best.name, [other.name for other in tied]


def test_what_repeats_tell_apart_is_not_tied_however_steady_it_is():
    most, less = arm("most", [10.0, 11.0, 12.0], 50.0), arm("less", [9.0, 10.1, 11.0], 5.0)
    assert best_and_tied(less, most) == ("most", [])


def test_of_those_that_are_tied_the_lowest_p90_of_gaps_is_best_and_the_others_are_named():
    noisy = arm("noisy", [10.0, 11.0, 12.0], 50.0), arm("steady", [12.0, 10.0, 10.5], 5.0)
    assert best_and_tied(*noisy) == best_and_tied(*reversed(noisy)) == ("steady", ["noisy"])
    assert best_and_tied(arm("a", [1.0, 1.0], 9.0), arm("b", [1.0, 1.0], 8.0)) == ("b", ["a"])


def test_a_single_repeat_is_taken_at_its_word():
    assert best_and_tied(arm("a", [1.0], 1.0), arm("b", [1.01], 9.0)) == ("b", [])
    assert best_and_tied(arm("a", [1.0], 9.0), arm("b", [1.0], 1.0)) == ("b", ["a"])


@given(st.lists(st.lists(st.floats(0, 9), min_size=3, max_size=3), min_size=1, max_size=5))
def test_nobody_beats_the_best_both_in_what_is_done_and_in_gaps(values: list[list[float]]):
    arms = [arm(str(number), own, float(number)) for number, own in enumerate(values)]
    best, tied = best_arm(arms)
    assert best not in tied
    assert max(arms, key=lambda one: one.mean) in [best, *tied]
    assert all(best.gap_ms <= other.gap_ms for other in tied)


def test_a_table_has_a_row_for_each_load_with_its_best_arm_and_figures():
    trials = [
        ("good", load, name, repeat, value + repeat)
        for load, name, value in ((1, "a", 2.0), (1, "b", 2.0), (2, "a", 1.0), (2, "b", 3.0))
        for repeat in range(3)
    ]
    rates = pl.DataFrame(trials, schema=["rate", "load", "arm", "repeat", "value"], orient="row")
    rows = [(load, name, share, 7.0 if name == "a" else 9.0) for load in (1, 2) for name in "ab" for share in ("p90",)]
    gaps = pl.DataFrame([*rows, (1, "b", "p50", 0.0)], schema=["load", "arm", "percentile", "ms"], orient="row")
    found = best_table(rates, gaps, ["load"])
    assert found.columns == ["load", "best", "good", "ITL p90, ms", "tied with"]
    assert found.rows() == [(1, "a", 3.0, 7.0, "b"), (2, "b", 4.0, 9.0, None)]
    assert best_table(rates, gaps.clear(), ["load"])["ITL p90, ms"].to_list() == [None, None]


def test_a_load_that_has_no_value_of_a_key_has_its_gaps_too():
    rates = pl.DataFrame(
        [("good", None, name, 0, 1.0) for name in "ab"],
        schema={"rate": pl.String, "load": pl.Int64, "arm": pl.String, "repeat": pl.Int64, "value": pl.Float64},
        orient="row",
    )
    schema = {"load": pl.Int64, "arm": pl.String, "percentile": pl.String, "ms": pl.Float64}
    gaps = pl.DataFrame([(None, "a", "p90", 9.0), (None, "b", "p90", 7.0)], schema=schema, orient="row")
    assert best_table(rates, gaps, ["load"]).rows() == [(None, "b", 1.0, 7.0, "a")]


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [((3.0, 5.0), "held"), ((2.9, 5.0), "open"), ((1.0, 2.9), "missed"), ((None, None), "held")],
)
def test_a_bar_is_judged_by_the_whole_interval(bounds: tuple, verdict: str):
    low, high = bounds
    found = Interval(value=4.0, low=low, high=high, num_repeats=3)
    assert judged(found, at_least=3) == verdict
    assert ("no interval" in told(found)) == (low is None)
