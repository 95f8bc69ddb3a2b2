"""Goodput and attainment against counting by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.common.slo import Slo
from moonshard.experiments.reading.tables.goodput import Latency, Offered, attained, goodput, meets

MS = st.one_of(st.none(), st.sampled_from((1.0, 2.0, 3.0)))
LATENCIES = st.builds(Latency, ttft_ms=MS, tpot_ms=MS, max_itl_ms=MS)
SLOS = st.builds(Slo, ttft_ms=MS, tpot_ms=MS, max_itl_ms=MS)
OFFERED = st.builds(Offered, rate_per_s=st.sampled_from((0.5, 1.0, 2.0, 4.0)), attained=st.floats(0, 1))


@given(SLOS, st.lists(LATENCIES, min_size=1, max_size=9))
def test_attained_is_the_share_that_breaks_no_objective(slo: Slo, requests: list[Latency]):
    num_good = 0
    for one in requests:
        broken = [one.ttft_ms is None]
        for value, bound in ((one.ttft_ms, slo.ttft_ms), (one.tpot_ms, slo.tpot_ms), (one.max_itl_ms, slo.max_itl_ms)):
            broken.append(value is not None and bound is not None and value > bound)
        num_good += not any(broken)
    assert attained(slo, requests) == num_good / len(requests)


@given(st.lists(OFFERED, max_size=6), st.floats(0.01, 1))
def test_goodput_is_the_highest_rate_that_attains(loads: list[Offered], attainment: float):
    best = None
    for load in sorted(loads, key=lambda load: load.rate_per_s):
        if load.attained >= attainment:
            best = load.rate_per_s
    assert goodput(loads, attainment) == best


def test_a_failed_request_meets_nothing_even_without_objectives():
    assert not meets(Slo(), Latency(ttft_ms=None))
    assert meets(Slo(), Latency(ttft_ms=1e9))
    assert meets(Slo(ttft_ms=5, tpot_ms=1, max_itl_ms=1), Latency(ttft_ms=5))


def test_no_requests_have_no_share():
    with pytest.raises(ValueError, match="no requests"):
        attained(Slo(), [])
