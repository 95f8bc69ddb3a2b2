"""What is fetched costs the least time of all that could be, and nobody waits longer than computing takes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.tiers.fetches import (
    NOTHING,
    PROBE_BLOCKS,
    PROBE_EVERY_S,
    UNKNOWN_WAIT_S,
    FetchTimes,
    Run,
    runs_of,
)

BLOCK_SIZE = 16
TIERS = ("host", "store", "ssd")
runs = st.lists(st.builds(Run, st.sampled_from(TIERS), st.integers(1, 40)), max_size=6)


def known(*, token_s: float, block_s: dict[str, tuple[float, float]]) -> FetchTimes:
    """Times that are on lines: of computing in proportion, of each tier with a fixed part and one for each block."""
    times = FetchTimes(BLOCK_SIZE)
    for amount in (1, 10, 100):
        times.computed(amount, amount * token_s)
        for tier, (fixed_s, each_s) in block_s.items():
            times.fetched(tier, amount, fixed_s + each_s * amount)
    return times


def merged(asked: Sequence[Run]) -> list[Run]:
    found = list[Run]()
    for run in asked:
        if found and found[-1].tier == run.tier:
            found[-1] = Run(run.tier, found[-1].num_blocks + run.num_blocks)
        else:
            found.append(run)
    return found


@given(
    asked=runs,
    token_s=st.floats(1e-6, 1e-2),
    costs=st.tuples(*[st.tuples(st.floats(0, 0.1), st.floats(1e-6, 0.1))] * len(TIERS)),
)
def test_no_other_number_of_blocks_is_faster(asked: list[Run], token_s: float, costs: tuple):
    block_s: dict[str, tuple[float, float]] = dict(zip(TIERS, costs, strict=True))
    times = known(token_s=token_s, block_s=block_s)
    plan = times.plan(asked, 0, 0.0)
    total = sum(run.num_blocks for run in asked)

    def seconds(num_blocks: int) -> float:
        """Brute force: fetch the first so many, compute the rest."""
        left, took = num_blocks, 0.0
        for run in merged(asked):
            taken = min(left, run.num_blocks)
            left -= taken
            fixed_s, each_s = block_s[run.tier]
            took += fixed_s + each_s * taken if taken else 0.0
        return took + (total - num_blocks) * BLOCK_SIZE * token_s

    best = min(map(seconds, range(total + 1)))
    chosen = 0 if plan.wait_s == 0 else plan.num_blocks  # what nobody waits for costs nobody
    assert seconds(chosen) <= best * 1.001 + 1e-6


@given(asked=runs, num_ahead=st.integers(0, 1000))
def test_nobody_waits_longer_than_computing_would_take(asked: list[Run], num_ahead: int):
    times = known(token_s=1e-3, block_s=dict.fromkeys(TIERS, (0.0001, 0.0001)))
    plan = times.plan(asked, num_ahead, 0.0)
    num_tokens = plan.num_blocks * BLOCK_SIZE + num_ahead
    assert plan.wait_s <= num_tokens * 1e-3 * 1.001
    assert (plan.wait_s > 0) == bool(asked)


def test_what_is_unknown_is_tried_and_waited_for_a_while():
    assert FetchTimes(BLOCK_SIZE).plan([Run("ssd", 5)], 0, 0.0).num_blocks == 5
    assert FetchTimes(BLOCK_SIZE).plan([Run("ssd", 5)], 0, 0.0).wait_s == UNKNOWN_WAIT_S


def test_a_tier_that_is_not_worth_it_is_asked_for_a_little_now_and_then_and_nobody_waits():
    times = known(token_s=1e-6, block_s={"ssd": (1.0, 1.0)})
    first = times.plan([Run("ssd", 50)], 0, 100.0)
    assert (first.num_blocks, first.wait_s) == (PROBE_BLOCKS, 0.0)
    assert times.plan([Run("ssd", 50)], 0, 100.0 + PROBE_EVERY_S / 2) == NOTHING
    assert times.plan([Run("ssd", 50)], 0, 100.0 + PROBE_EVERY_S).num_blocks == PROBE_BLOCKS
    times.fetched("ssd", PROBE_BLOCKS, 1e-6)
    assert times.plan([Run("ssd", 50)], 0, 101.0 + PROBE_EVERY_S).num_blocks == 50


def test_landing_counts_as_a_part_of_fetching():
    times = known(token_s=1e-3, block_s={"host": (0.0, 1e-3)})
    assert times.plan([Run("host", 10)], 0, 0.0).wait_s > 0
    for amount in (1, 10, 100):
        times.landed(amount, amount * 1.0)
    assert times.plan([Run("host", 10)], 0, 0.0).wait_s == 0
    assert times.fetch_s("host", 10) == pytest.approx(10.01, rel=1e-2)


def test_the_runs_of_a_chain_end_where_no_tier_has_a_block():
    assert runs_of(["host", "host", "ssd", None, "ssd"]) == (Run("host", 2), Run("ssd", 1))
    assert runs_of([None, "host"]) == ()
