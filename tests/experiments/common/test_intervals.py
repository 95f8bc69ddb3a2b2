"""Intervals: their estimates against plain percentiles, exact where the answer is known, and as wide as they should."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.experiments.common.intervals import (
    Interval,
    Samples,
    latency_interval,
    mean_difference,
    mean_interval,
    percentile_differences,
    percentile_intervals,
    rate_interval,
    ratio_interval,
    student_t,
)

SHARES = (0.5, 0.9, 0.99)


def samples(values: np.ndarray) -> Samples:
    """One value for each request."""
    return Samples(values, np.arange(len(values)), len(values))


def queue_like(random: np.random.Generator, num_requests: int, *, shared: float = 0.8) -> np.ndarray:
    """Normal with variance 1, each value beside those that came just before it."""
    values = random.normal(size=num_requests)
    for index in range(1, num_requests):
        values[index] = shared * values[index - 1] + np.sqrt(1 - shared**2) * values[index]
    return values


def share_held(num_seeds: int, holds: Callable[[np.random.Generator], bool]) -> float:
    return sum(holds(np.random.default_rng(seed)) for seed in range(num_seeds)) / num_seeds


@settings(max_examples=30)
@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 40), st.integers(1, 4))
def test_a_figure_is_the_mean_of_the_repeats_percentiles(seed: int, num_repeats: int, num_requests: int, each: int):
    random = np.random.default_rng(seed)
    owners = np.repeat(np.arange(num_requests), each)
    sides = [
        [Samples(random.normal(size=len(owners)), random.permutation(owners), num_requests) for _ in range(num_repeats)]
        for _ in range(2)
    ]
    found = percentile_differences(sides[0], sides[1], SHARES, is_paired=True, num_resamples=5)
    expected = [
        np.mean([np.quantile(one.values, SHARES, method="inverted_cdf") for one in side], axis=0) for side in sides
    ]
    assert [one.a for one in found] == pytest.approx(list(expected[0]))
    assert [one.b for one in found] == pytest.approx(list(expected[1]))
    latencies = [Samples(np.exp(one.values), one.owners, num_requests) for one in sides[0]]
    alone = percentile_intervals(latencies, SHARES, num_resamples=5)
    assert [one.value for one in alone] == pytest.approx(list(np.exp(expected[0])))
    assert {one.num_repeats for one in (*found, *alone)} == {num_repeats}


class TestOverRepeats:
    """What a repeat has of its own (another machine's neighbours, other prompts) is what intervals have to cover."""

    @pytest.mark.parametrize("num_repeats", [2, 3, 5, 13])
    def test_a_rate_that_did_not_change_is_held_as_often_as_they_say(self, num_repeats: int):
        def holds(random: np.random.Generator) -> bool:
            found = mean_difference(random.normal(size=num_repeats).tolist(), random.normal(size=num_repeats).tolist())
            assert found.low is not None
            assert found.high is not None
            return found.low <= 0 <= found.high

        assert 0.93 <= share_held(1000, holds) <= 0.97

    def test_a_percentile_that_did_not_change_is_held_as_often_as_they_say(self):
        def repeats(random: np.random.Generator) -> list[Samples]:
            return [samples(random.normal() + queue_like(random, 60)) for _ in range(3)]

        def holds(random: np.random.Generator) -> bool:
            (found,) = percentile_differences(repeats(random), repeats(random), (0.5,), is_paired=False)
            return not found.is_clear

        assert 0.92 <= share_held(300, holds) <= 0.98

    @pytest.mark.parametrize(("num_repeats", "is_clear"), [(1, False), (2, False), (3, True)])
    def test_no_verdict_comes_of_fewer_than_three_repeats(self, num_repeats: int, is_clear: bool):
        before = [samples(np.arange(50.0) + repeat) for repeat in range(num_repeats)]
        after = [samples(one.values + 100 + repeat / 50) for repeat, one in enumerate(before)]
        for found in percentile_differences(before, after, SHARES, is_paired=True):
            assert found.low is not None
            assert found.low > 0 or num_repeats == 2
            assert found.is_clear == is_clear
        rates = mean_difference([1.0] * num_repeats, [2.0 + n / 99 for n in range(num_repeats)])
        assert rates.is_clear == is_clear

    def test_bounds_are_students(self):
        found = mean_difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
        assert (found.a, found.b, found.difference) == (2, 4, 2)
        assert (found.low, found.high) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5))
        assert mean_difference([1.0], [3.0]).low is None
        assert mean_interval([2.0]) == Interval(value=2.0, low=None, high=None, num_repeats=1)
        one = mean_interval([1.0, 2.0, 3.0])
        assert (one.value, one.low) == pytest.approx((2.0, 2 - 4.3027 / 3**0.5))

    def test_ratios_are_as_far_above_as_below_one(self):
        found, turned = ratio_interval([1.0, 2.0, 4.0]), ratio_interval([1.0, 1 / 2, 1 / 4])
        assert found.low is not None
        assert found.high is not None
        assert turned.low is not None
        assert found.value == pytest.approx(2.0)
        assert found.high / 2 == pytest.approx(2 / found.low) == pytest.approx(2 ** (4.3027 / 3**0.5))
        assert (1 / turned.value, 1 / turned.low) == pytest.approx((found.value, found.high))
        assert (ratio_interval([3.0]).value, ratio_interval([3.0]).low) == (pytest.approx(3.0), None)

    def test_rates_have_no_bounds_that_cannot_be(self):
        shares = [1.0, 0.9, 1.0]
        whole, cut = mean_interval(shares), rate_interval(shares, highest=1.0)
        assert whole.high is not None
        assert whole.high > 1
        assert cut == Interval(value=whole.value, low=whole.low, high=1.0, num_repeats=3)
        assert (rate_interval([0.0, 0.1]).low, rate_interval([0.5]).low) == (0.0, None)

    def test_latencies_have_no_bound_below_zero(self):
        found = latency_interval([5.0, 46.0, 9.0])
        assert found == ratio_interval([5.0, 46.0, 9.0])
        assert found.low is not None
        assert 0 < found.low < 5
        assert latency_interval([0.0, 1.0, 2.0]) == mean_interval([0.0, 1.0, 2.0])
        assert latency_interval([-0.1, 0.1, 0.3]).value == pytest.approx(0.1)
        with pytest.raises(ValueError, match="nothing was measured"):
            latency_interval([])

    @pytest.mark.parametrize("ratios", [[1.0, 0.0], [-1.0], []])
    def test_what_is_not_a_ratio_is_refused(self, ratios: list[float]):
        with pytest.raises(ValueError, match=r"logarithm|nothing was measured"):
            ratio_interval(ratios)

    @pytest.mark.parametrize(("num_freedoms", "t"), [(1, 12.706), (10, 2.228), (11, 2.201), (30, 2.042), (999, 1.962)])
    def test_quantiles_are_those_of_the_tables(self, num_freedoms: int, t: float):
        assert student_t(num_freedoms) == pytest.approx(t, abs=3e-3)

    def test_a_repeat_of_which_nothing_completed_is_left_out(self):
        nothing, one = Samples(np.ones(0), np.zeros(0, np.int64), 5), samples(np.arange(5.0))
        (found,) = percentile_differences([one, nothing], [one, one], (0.5,), is_paired=True)
        assert (found.a, found.b, found.num_repeats) == (2, 2, 1)
        assert percentile_intervals([one, nothing, one], (0.5,))[0].num_repeats == 2


class TestOfASingleRepeat:
    def test_paired_requests_that_all_changed_alike_leave_no_doubt(self):
        before = np.random.default_rng(1).exponential(size=200)
        (found,) = percentile_differences([samples(before)], [samples(before + 3)], (0.5,), is_paired=True)
        assert (found.difference, found.low, found.high) == pytest.approx((3, 3, 3))
        (same,) = percentile_differences([samples(before)], [samples(before)], (0.9,), is_paired=True)
        assert (same.low, same.high) == (0, 0)

    def test_pairing_narrows_what_requests_have_in_common(self):
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

    @pytest.mark.parametrize(("shared", "least"), [(0.0, 0.88), (0.5, 0.84), (0.8, 0.78)])
    def test_requests_that_waited_in_one_queue_are_no_independent_evidence(self, shared: float, least: float):
        """Drawn one by one, those of the last case hold the truth less often than three times of five."""

        def holds(random: np.random.Generator) -> bool:
            values = queue_like(random, 150, shared=shared)
            (found,) = percentile_intervals([samples(values)], (0.5,), num_resamples=200)
            assert found.low is not None
            assert found.high is not None
            return found.low <= 0 <= found.high

        assert least <= share_held(150, holds) <= 0.995

    def test_gaps_of_one_request_are_drawn_together(self):
        """A request of long gaps is in a resample with all of them or with none."""
        owners = np.repeat(np.arange(10), 50)
        slow = np.where(owners == 4, 10.0, 1.0)
        sides = [Samples(np.ones(500), owners, 10)], [Samples(slow, owners, 10)]
        (found,) = percentile_differences(*sides, (0.95,), is_paired=True)
        assert (found.difference, found.low, found.high) == (9, 0, 9)

    def test_the_same_seed_gives_the_same_interval(self):
        a, b = ([samples(np.random.default_rng(side).normal(size=50))] for side in (0, 1))
        one, again, other = (percentile_differences(a, b, (0.9,), is_paired=False, seed=seed)[0] for seed in (0, 0, 7))
        assert one == again
        assert (one.low, one.high) != (other.low, other.high)

    @settings(max_examples=20)
    @given(st.integers(0, 99), st.integers(1, 40))
    def test_bounds_are_values_that_were_measured(self, seed: int, num_requests: int):
        values = np.random.default_rng(seed).normal(size=num_requests)
        for one in percentile_intervals([samples(values)], SHARES, num_resamples=50):
            assert one.low is not None
            assert one.high is not None
            assert values.min() <= one.low <= one.high <= values.max()


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


def test_nothing_has_no_interval():
    with pytest.raises(ValueError, match="nothing was measured"):
        percentile_intervals([Samples(np.ones(0), np.zeros(0, np.int64), 3)], SHARES)
    with pytest.raises(ValueError, match="nothing was measured"):
        mean_interval([])
