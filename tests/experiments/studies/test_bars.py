"""The bars of studies: judged where they are meant to be, and where they cannot be, that is said."""

from collections.abc import Sequence

import polars as pl
import pytest

from moonshard.experiments.common.intervals import Interval
from moonshard.experiments.studies.overload.bar import share_of_peak
from moonshard.experiments.studies.overload.bar import verdict as verdict_of_overload
from moonshard.experiments.studies.pd_vs_aggregated.bar import Load, verdict


def load(rate_per_s: float, attained: float, low: float, high: float) -> Load:
    times = Interval(value=(low + high) / 2, low=low, high=high, num_repeats=3)
    return Load(rate_per_s=rate_per_s, baseline="chunks of 64", attained=attained, times_better=times)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        (
            [load(3, 0.1, 9, 10), load(1, 1.0, 1, 2), load(2, 0.89, 3.1, 4)],
            ("at 2 requests/s: 89.0%", "bar of 3: held"),
        ),
        ([load(2, 0.5, 2, 4)], ("at 2 requests/s", "bar of 3: open")),
        ([load(2, 0.5, 2, 2.5)], ("at 2 requests/s", "bar of 3: missed")),
        ([load(1, 1.0, 8, 9), load(2, 0.9, 4, 5)], ("not judged: the baseline keeps its SLO", "highest, 2 requests/s")),
    ],
)
def test_it_is_judged_at_the_lowest_rate_at_which_the_baseline_has_lost_its_slo(
    loads: Sequence[Load], expected: Sequence[str]
):
    found = verdict(loads, 0.9)
    assert all(one in found for one in expected), found


def test_what_is_left_at_the_highest_load_is_taken_of_the_peak_repeat_by_repeat():
    peak, share = share_of_peak({3.0: [4.0, 9.0], 1.0: [5.0, 10.0], 0.5: [2.0, 3.0]})
    assert peak == 1.0
    assert share.value == pytest.approx(0.85)
    assert share.high is not None
    assert share.high - share.value == pytest.approx(12.7062 * 0.05)
    assert share_of_peak({1.0: [0.0], 3.0: [0.0]})[1].value == 0.0


@pytest.mark.parametrize(
    ("highest", "good", "expected"),
    [
        (3.0, [9.5, 9.6, 9.4], "0.95 (95% interval 0.93 to 0.97, 3 repeats) of the peak, which is at 1 times."),
        (3.0, [9.5, 9.6, 9.4], "The bar of 0.9: held."),
        (3.0, [8.0, 8.1, 8.2], ": missed"),
        (3.0, [11.0, 10.0, 12.0], "at 3 times the capacity it is the peak itself. The bar of 0.9: held."),
        (2.9, [9.5, 9.6, 9.4], "is not judged"),
    ],
)
def test_the_bar_of_overload_is_for_three_times_the_capacity(highest: float, good: list[float], expected: str):
    rates = {1.0: [10.0, 10.0, 10.0], highest: good}
    rows = [(at, repeat, value) for at, values in rates.items() for repeat, value in enumerate(values)]
    trials = pl.DataFrame(rows[::-1], schema=["load", "repeat", "value"], orient="row")
    found = verdict_of_overload("refuses", trials, "load")
    assert expected in found
    assert ("not judged" in found) == (highest < 3)


def test_a_repeat_that_was_broken_off_does_not_count():
    schema = ["load", "repeat", "value"]
    trials = pl.DataFrame([(1.0, 0, 4.0), (3.0, 0, 2.0), (1.0, 1, 9.0)], schema=schema, orient="row")
    assert "at 3 times the capacity 0.50 (one repeat" in verdict_of_overload("refuses", trials, "load")
    assert "no repeat has all" in verdict_of_overload("refuses", trials[1:], "load")
