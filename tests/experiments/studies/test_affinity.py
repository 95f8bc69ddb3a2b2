"""The affinity study: its sessions, its oracle against counting by hand, and its figures."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.studies.affinity.figures import figures
from moonshard.experiments.studies.affinity.report import grid_of, thoughts_grid_of
from moonshard.experiments.studies.affinity.rounds import ArmName, Round
from moonshard.experiments.studies.sessions import Turn
from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.workload.agents import agent_sessions, oracle_cached_tokens
from moonshard.experiments.workload.thoughts import Thoughts

THOUGHTS: tuple[Thoughts, ...] = ("none", "dropped", "kept")


def test_every_turn_resends_the_context_and_goes_on():
    for session in agent_sessions(pocket_text(), 3, 900):
        assert len(session) > 2
        for before, after in pairwise(session):
            assert after[: len(before)] == before
            assert len(after) > len(before)
        assert 600 < len(session[-1]) < 1500


def test_the_same_seed_gives_the_same_sessions_and_another_others():
    first, again, other = (agent_sessions(pocket_text(), 2, 600, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("thoughts", ["dropped", "kept"])
def test_kept_thoughts_leave_every_prompt_a_beginning_and_dropped_ones_that_of_the_last_exchange(thoughts: Thoughts):
    """Where a question follows an answer, what was thought for that answer and its calls is gone from the prompt."""
    specials = pocket_text().tokenizer.special_tokens
    begin, end, user = specials["<think>"], specials["</think>"], specials["<|im_user|>"]
    num_dropped = 0
    for session in agent_sessions(pocket_text(), 3, 900, thoughts=thoughts, thought_words=5):
        for before, after in pairwise(session):
            assert before[-1] == after[-1] == begin
            shared = next(
                place for place, pair in enumerate([*zip(before, after, strict=False), (0, 1)]) if pair[0] != pair[1]
            )
            if thoughts == "kept" or after.count(user) == before.count(user):
                assert shared == len(before)  # the rest of a loop of calls, or of anything
                continue
            num_dropped += 1
            assert after[shared - 1] == begin  # a thought of the last exchange: the first one that is gone
            assert after[shared] == end
            assert user not in before[shared:]
    assert (num_dropped > 0) == (thoughts == "dropped")


def test_thinking_sessions_are_the_same_conversations():
    plain, dropped, kept = (agent_sessions(pocket_text(), 2, 600, thoughts=how, thought_words=5) for how in THOUGHTS)
    assert [len(turns) for turns in plain] == [len(turns) for turns in dropped] == [len(turns) for turns in kept]
    assert all(len(short[-1]) < len(long[-1]) for short, long in zip(dropped, kept, strict=True))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=6), st.integers(1, 3))
def test_the_oracle_is_the_longest_beginning_in_blocks_of_any_prompt_before(prompts: list[list[int]], block_size: int):
    expected = []
    for index, prompt in enumerate(prompts):
        shared = 0
        for before in prompts[:index]:
            for size in range(block_size, len(prompt) + 1, block_size):
                if len(before) >= size and before[:size] == prompt[:size]:
                    shared = max(shared, size)
        expected.append(min(shared, len(prompt) - 1))
    assert oracle_cached_tokens(prompts, block_size) == expected


def a_round(arm: ArmName, later_ttft_ms: float, cached: int, computed: dict[str, float]) -> Round:
    first = Turn(session=0, index=0, sent_s=0.0, prompt_tokens=100, cached_tokens=0, oracle_tokens=0, ttft_ms=50.0)
    second = replace(
        first,
        handoff_gap_ms=7.0,
        index=1,
        prompt_tokens=300,
        cached_tokens=cached,
        oracle_tokens=96,
        ttft_ms=later_ttft_ms,
    )
    return Round(arm=arm, number=0, turns=[first, second], computed_tokens=computed)


def test_figures_are_shares_of_tokens_and_medians_of_turns():
    found = figures("cost", [a_round("cost", 20.0, 92, {"a": 100, "b": 200, "c": 0}), a_round("random", 90.0, 0, {})])
    assert found.hit_rate == 92 / 400
    assert found.points_below_oracle == pytest.approx(1.0)
    assert found.load_max_over_mean == 2.0
    assert (found.first_ttft_p50_ms, found.later_ttft_p50_ms, found.handoff_gap_p50_ms) == (50.0, 20.0, 7.0)


def test_the_table_of_thoughts_has_the_arms_that_were_run_and_no_other():
    assert thoughts_grid_of([a_round("cost", 20.0, 92, {"a": 1.0})]).rows == ()
    grid = thoughts_grid_of([a_round("cost", 20.0, 92, {"a": 1.0}), a_round("kept", 20.0, 92, {"a": 800.0})])
    (row,) = grid.rows
    told = dict(zip(grid.columns, row, strict=True))
    assert (told["arm"], told["prompt tokens a turn"], told["prefilled a turn"]) == ("`kept`", "200", "154")
    assert told["found again"] == f"{92 / 400:.1%}"


def test_an_arm_without_a_round_has_no_figures():
    with pytest.raises(ValueError, match="no round of arm header"):
        figures("header", [a_round("cost", 20.0, 92, {"a": 1.0})])


@pytest.mark.parametrize(("later_ms", "cached", "computed", "held"), [(30, 90, 110, 3), (31, 87, 150, 0)])
def test_the_bars_are_held_and_missed_by_name(later_ms: float, cached: int, computed: float, held: int):
    load = {"a": computed, "b": 100.0, "c": 100.0}
    rounds = [
        a_round("random", 90.0, 0, load),
        a_round("header", 30.0, 96, load),
        a_round("cost", later_ms, cached, load),
    ]
    (note,) = grid_of(rounds).notes
    assert note.count(": held") == held
    assert note.count(": missed") == 3 - held


def test_one_bad_round_is_not_hidden_by_the_others():
    even, uneven = {"a": 100.0, "b": 100.0, "c": 100.0}, {"a": 200.0, "b": 50.0, "c": 50.0}
    rounds = [a_round("cost", 20.0, 92, computed) for computed in (even, uneven, even)]
    assert figures("cost", rounds).load_max_over_mean == 2.0
