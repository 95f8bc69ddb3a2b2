"""Intervals: their estimates against plain percentiles, exact where the answer is known, and as wide as they should."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.experiments.lab.bootstrap import (
    Interval,
    Samples,
    mean_difference,
    mean_interval,
    percentile_differences,
    percentile_intervals,
)

SHARES = (0.5, 0.9, 0.99)


def samples(values: np.ndarray) -> Samples:
    """One value for each request."""
    return Samples(values, np.arange(len(values)), len(values))


@settings(max_examples=30)
@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 40), st.integers(1, 4))
def test_estimates_are_percentiles_of_all_values(seed: int, num_repeats: int, num_requests: int, per_request: int):
    random = np.random.default_rng(seed)
    sides = [
        [
            Samples(
                random.normal(size=num_requests * per_request),
                random.permutation(np.repeat(np.arange(num_requests), per_request)),
                num_requests,
            )
            for _ in range(num_repeats)
        ]
        for _ in range(2)
    ]
    found = percentile_differences(sides[0], sides[1], SHARES, is_paired=True, num_resamples=5)
    for side, of in ((sides[0], "a"), (sides[1], "b")):
        whole = np.concatenate([one.values for one in side])
        expected = np.quantile(whole, SHARES, method="inverted_cdf")
        assert [getattr(one, of) for one in found] == pytest.approx(list(expected))


def test_paired_requests_that_all_changed_alike_leave_no_doubt():
    before = np.random.default_rng(1).exponential(size=200)
    (found,) = percentile_differences([samples(before)], [samples(before + 3)], (0.5,), is_paired=True)
    assert (found.difference, found.low, found.high) == pytest.approx((3, 3, 3))
    assert found.is_clear
    (same,) = percentile_differences([samples(before)], [samples(before)], (0.9,), is_paired=True)
    assert (same.low, same.high, same.is_clear) == (0, 0, False)


def test_pairing_narrows_what_requests_have_in_common():
    random = np.random.default_rng(2)
    before = random.exponential(size=300)
    sides = [samples(before)], [samples(before + 0.1 + random.normal(scale=0.01, size=300))]
    widths = [
        found.high - found.low
        for is_paired in (True, False)
        for found in percentile_differences(*sides, (0.5,), is_paired=is_paired)
        if found.low is not None and found.high is not None
    ]
    assert widths[0] < widths[1] / 2


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    num_held = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        sides = [samples(random.normal(loc=loc, size=120)) for loc in (0, 1)]
        (found,) = percentile_differences([sides[0]], [sides[1]], (0.5,), is_paired=False, num_resamples=200)
        assert found.low is not None
        assert found.high is not None
        num_held += found.low <= 1 <= found.high
    assert 88 <= num_held <= 100


def test_gaps_of_one_request_are_drawn_together():
    """A request of long gaps is in a resample with all of them or with none: its gaps are no independent evidence."""
    owners = np.repeat(np.arange(10), 50)
    slow = np.where(owners == 0, 10.0, 1.0)
    found = percentile_differences(
        [Samples(np.ones(500), owners, 10)], [Samples(slow, owners, 10)], (0.95,), is_paired=True
    )[0]
    assert found.difference == 9
    assert (found.low, found.high) == (0, 9)


def test_the_same_seed_gives_the_same_interval():
    sides = [samples(np.random.default_rng(side).normal(size=50)) for side in (0, 1)]
    one, again, other = (
        percentile_differences([sides[0]], [sides[1]], (0.9,), is_paired=False, seed=seed)[0] for seed in (0, 0, 1)
    )
    assert one == again
    assert (one.low, one.high) != (other.low, other.high)


def test_a_mean_of_repeats_has_an_interval_from_two_repeats_on():
    assert mean_difference([1.0], [3.0]).low is None
    found = mean_difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert (found.a, found.b, found.difference) == (2, 4, 2)
    assert (found.low, found.high) == (1, 3)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([], [], "0 repeats beside 0"),
        ([samples(np.ones(3))], [], "1 repeats beside 0"),
        ([samples(np.ones(3))], [samples(np.ones(4))], "the same requests"),
        ([samples(np.ones(3))], [Samples(np.ones(0), np.zeros(0, np.int64), 3)], "nothing was measured"),
    ],
)
def test_sides_that_do_not_belong_together_are_refused(a: list[Samples], b: list[Samples], said: str):
    with pytest.raises(ValueError, match=said):
        percentile_differences(a, b, SHARES, is_paired=True)
    if not b:
        with pytest.raises(ValueError, match="repeats beside"):
            mean_difference([0.0] * len(a), [])


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 40))
def test_one_side_is_its_percentiles_inside_their_interval(seed: int, num_repeats: int, num_requests: int):
    random = np.random.default_rng(seed)
    repeats = [samples(random.normal(size=num_requests)) for _ in range(num_repeats)]
    found = percentile_intervals(repeats, SHARES, num_resamples=50)
    expected = np.quantile(np.concatenate([one.values for one in repeats]), SHARES, method="inverted_cdf")
    assert [one.value for one in found] == pytest.approx(list(expected))
    for one in found:
        assert one.low is not None
        assert one.high is not None
        assert min(r.values.min() for r in repeats) <= one.low <= one.high <= max(r.values.max() for r in repeats)


def test_an_interval_of_one_side_holds_the_truth_about_as_often_as_it_says():
    num_held = 0
    for seed in range(100):
        values = np.random.default_rng(seed).normal(size=120)
        (found,) = percentile_intervals([samples(values)], (0.5,), num_resamples=200)
        assert found.low is not None
        assert found.high is not None
        num_held += found.low <= 0 <= found.high
    assert 88 <= num_held <= 100


def test_a_rate_has_an_interval_from_two_repeats_on():
    assert mean_interval([2.0]) == Interval(value=2.0, low=None, high=None)
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)


def test_nothing_has_no_interval():
    with pytest.raises(ValueError, match="nothing was measured"):
        percentile_intervals([Samples(np.ones(0), np.zeros(0, np.int64), 3)], SHARES)
    with pytest.raises(ValueError, match="nothing was measured"):
        mean_interval([])
