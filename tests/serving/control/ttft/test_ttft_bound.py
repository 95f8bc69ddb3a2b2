"""Which requests would get their first token too late, and when they are told to try again."""

import math

import pytest

from moonshard.serving.control.ttft.bound import (
    AUTO_STRETCH,
    AUTO_WAIT_S,
    LATELY_S,
    MAX_RETRY_AFTER_S,
    Refusals,
    ttft_limit_s,
)


def test_a_number_is_the_bound_and_none_is_none():
    assert ttft_limit_s(1.5, alone_s=9.0) == 1.5
    assert ttft_limit_s(None, alone_s=9.0) == math.inf


@pytest.mark.parametrize("alone_s", [0.01, AUTO_WAIT_S / AUTO_STRETCH, 10.0])
def test_by_default_the_wait_is_bounded_and_never_the_prompts_own_time(alone_s: float):
    wait_s = ttft_limit_s("auto", alone_s) - alone_s
    assert wait_s == pytest.approx(max(AUTO_WAIT_S, AUTO_STRETCH * alone_s))


def test_those_refused_together_come_back_one_after_the_other():
    refusals = Refusals()
    told_s = [refusals.retry_after_s(100.0, excess_s=2.0, alone_s=0.5) for _ in range(40)]
    assert told_s[:3] == [2.0, 2.5, 3.0]
    assert told_s[39] == 2.0 + 39 * 0.5


def test_what_is_long_past_counts_no_more_and_nobody_is_told_never():
    refusals = Refusals()
    for _ in range(1000):
        refusals.retry_after_s(100.0, excess_s=0.1, alone_s=1.0)
    assert refusals.retry_after_s(100.0, excess_s=0.1, alone_s=1.0) == MAX_RETRY_AFTER_S
    assert refusals.retry_after_s(100.1 + LATELY_S, excess_s=0.1, alone_s=1.0) == 1.0
