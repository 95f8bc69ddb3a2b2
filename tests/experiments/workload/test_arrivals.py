"""Intervals between requests have the mean and the variation that were asked for."""

from itertools import pairwise
from random import Random
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.workload.arrivals import arrivals
from moonshard.experiments.workload.plan import WorkloadError


@pytest.mark.parametrize("interval_cv", [0.0, 0.5, 1.0, 3.0])
def test_intervals_have_the_mean_and_the_variation_that_were_asked_for(interval_cv: float):
    times = arrivals(20.0, interval_cv, 20_001, Random(0))
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0
    assert mean(gaps) == pytest.approx(1 / 20)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(interval_cv, rel=0.1, abs=1e-9)


@pytest.mark.parametrize(("rate", "interval_cv", "said"), [(0.0, 1.0, "rate_per_s"), (1.0, -1.0, "interval_cv")])
def test_nonsense_is_refused(rate: float, interval_cv: float, said: str):
    with pytest.raises(WorkloadError, match=said):
        arrivals(rate, interval_cv, 2, Random(0))


def test_bursts_in_which_no_time_passes_are_refused():
    with pytest.raises(WorkloadError, match="interval_cv is 1e"):
        arrivals(1.0, 1e6, 3, Random(0))


@given(st.floats(0.1, 100), st.floats(0, 3), st.integers(1, 50), st.integers(0, 9))
def test_every_seed_offers_the_same_load(rate_per_s: float, interval_cv: float, num_requests: int, seed: int):
    times = arrivals(rate_per_s, interval_cv, num_requests, Random(seed))
    assert len(times) == num_requests
    assert sorted(times) == list(times)
    assert (times[0], times[-1]) == (0, pytest.approx((num_requests - 1) / rate_per_s))
