"""Made-up coding agents are what their docstring says of them."""

import math
from collections import defaultdict
from itertools import pairwise
from statistics import NormalDist, median

import pytest

from moonshard.experiments.common.trace_file import BLOCK_TOKENS
from moonshard.experiments.replay.synthetic import (
    ANSWER_S,
    CODING_SYSTEM_BLOCKS,
    HUMAN_S,
    MAX_CONTEXT_TOKENS,
    NEW_TOKENS,
    NUM_SYSTEM_PROMPTS,
    STEPS,
    TOOL_S,
    TURNS,
    coding_agent_trace,
)

OVER_S = 7200.0
NORMAL = NormalDist()


def quantile(median_sigma: tuple[float, float], share: float) -> float:
    return median_sigma[0] * math.exp(median_sigma[1] * NORMAL.inv_cdf(share))


def share_above(median_sigma: tuple[float, float], least: float) -> float:
    return NORMAL.cdf(-math.log(least / median_sigma[0]) / median_sigma[1])


def mean(median_sigma: tuple[float, float]) -> float:
    return median_sigma[0] * math.exp(median_sigma[1] ** 2 / 2)


def share_of_the_sum_above(median_sigma: tuple[float, float], least: float) -> float:
    return NORMAL.cdf(median_sigma[1] - math.log(least / median_sigma[0]) / median_sigma[1])


def mean_rounded_up(median_sigma: tuple[float, float]) -> float:
    return 1 + sum(share_above(median_sigma, least) for least in range(1, 100_000))


def test_the_distributions_are_those_that_were_published():
    assert share_above(TOOL_S, 60) == pytest.approx(0.0397, abs=5e-4)
    assert share_of_the_sum_above(TOOL_S, 60) == pytest.approx(0.847, abs=5e-3)
    assert quantile(HUMAN_S, 0.9) == pytest.approx(20.6 * 60, rel=0.01)
    assert quantile(ANSWER_S, 0.9) == pytest.approx(22.2, rel=0.01)
    assert mean(NEW_TOKENS) == pytest.approx(1709, rel=0.01)
    assert share_above(TURNS, 1) == pytest.approx(1 - 0.585, abs=5e-3)
    assert mean_rounded_up(TURNS) == pytest.approx(9.2, rel=0.05)
    assert mean_rounded_up(STEPS) == pytest.approx(8.8, rel=0.05)
    assert math.ceil(quantile(STEPS, 0.5)) == 2


def test_steps_grow_by_what_is_new_and_keep_all_that_was_there():
    by_session = defaultdict(list)
    for request in coding_agent_trace(60, over_s=OVER_S, seed=1):
        own = [block for block in request.blocks if block >= 1_000_000]
        by_session[own[0] // 1_000_000].append(request)
    grown = list[int]()
    for steps in by_session.values():
        for before, after in pairwise(steps):
            if after.input_tokens > before.input_tokens:
                grown.append(after.input_tokens - before.input_tokens)
                num_full = before.input_tokens // BLOCK_TOKENS
                assert after.blocks[:num_full] == before.blocks[:num_full]
                assert before.input_tokens % BLOCK_TOKENS == 0 or before.blocks[-1] not in after.blocks
    assert median(grown) == pytest.approx(875, rel=0.1)
    assert max(step.input_tokens for steps in by_session.values() for step in steps) <= MAX_CONTEXT_TOKENS


def test_sessions_share_system_prompts_and_nothing_else():
    sessions_of = defaultdict(set)
    for request in coding_agent_trace(60, over_s=OVER_S, seed=2):
        assert len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS)
        own = {block // 1_000_000 for block in request.blocks[CODING_SYSTEM_BLOCKS:]}
        assert len(own) == 1
        for block in request.blocks[:CODING_SYSTEM_BLOCKS]:
            sessions_of[block] |= own
    assert set(sessions_of) == set(range(NUM_SYSTEM_PROMPTS * CODING_SYSTEM_BLOCKS))
    assert all(len(sessions) > 1 for sessions in sessions_of.values())


def test_the_trace_is_in_order_ends_in_time_and_is_that_of_its_seed():
    found = coding_agent_trace(20, over_s=OVER_S, seed=3)
    assert [request.timestamp_ms for request in found] == sorted(request.timestamp_ms for request in found)
    assert 0 <= found[0].timestamp_ms <= found[-1].timestamp_ms < 1e3 * OVER_S
    assert coding_agent_trace(20, over_s=OVER_S, seed=3) == found != coding_agent_trace(20, over_s=OVER_S, seed=4)
