"""Workloads are what their options say: lengths, times, what begins alike; and what is wrong is refused by name."""

import json
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.trace_file import BLOCK_TOKENS, TracedRequest
from moonshard.experiments.workload.arrivals import gamma
from moonshard.experiments.workload.blocks import BlockPrompt, block_tokens
from moonshard.experiments.workload.kinds import BIN_S, closed, fixed, from_prompts, from_trace, sessions
from moonshard.experiments.workload.plan import Planned, Tokens, WorkloadError, check

VOCAB_SIZE = 500
CONTEXT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_context_tokens": 100_000}


@st.composite
def traces(draw) -> list[TracedRequest]:
    """Prompts of a few chains of blocks, at stamps three seconds apart or equal."""
    found, stamp = [], 0.0
    for _ in range(draw(st.integers(1, 12))):
        stamp += draw(st.sampled_from((0.0, 3000.0, 9000.0)))
        num_tokens = draw(st.integers(1, 4 * BLOCK_TOKENS))
        chain = draw(st.integers(0, 2))
        blocks = tuple(10 * chain + i for i in range(-(-num_tokens // BLOCK_TOKENS)))
        found.append(TracedRequest(stamp, num_tokens, draw(st.integers(1, 50)), blocks))
    return found


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def blocks_of(request: Planned) -> Sequence[int]:
    assert isinstance(request.prompt, BlockPrompt)
    return request.prompt.blocks


class TestTrace:
    @given(traces(), st.floats(0.05, 2), st.floats(0.1, 3), st.integers(0, 5))
    def test_what_begins_alike_in_the_trace_begins_alike_here(
        self, traced: list[TracedRequest], length_scale: float, time_scale: float, seed: int
    ):
        found = from_trace(traced, length_scale=length_scale, time_scale=time_scale, seed=seed, **CONTEXT).requests
        size = max(1, round(BLOCK_TOKENS * length_scale))
        by_length = sorted((len(request.prompt), request.max_tokens) for request in found)
        assert by_length == sorted(
            (max(1, round(one.input_tokens * length_scale)), max(1, round(one.output_tokens * length_scale)))
            for one in traced
        )
        for one in found:
            assert len(one.prompt.tokens()) == len(one.prompt)
            assert all(0 <= token < VOCAB_SIZE for token in one.prompt.tokens())
            for other in found:
                same = sum(a == b for a, b in zip(blocks_of(one), blocks_of(other), strict=False))
                common = min(len(one.prompt), len(other.prompt), same * size)
                assert shared(one.prompt.tokens(), other.prompt.tokens()) >= common

    @given(traces(), st.floats(0.1, 3), st.integers(0, 5))
    def test_requests_come_within_the_bins_of_their_stamps_and_in_order(self, traced, time_scale: float, seed: int):
        found = from_trace(traced, time_scale=time_scale, seed=seed, **CONTEXT)
        times = [request.at_s for request in found.requests if request.at_s is not None]
        assert found.is_open
        assert times == sorted(times)
        stamps = sorted(one.timestamp_ms / 1e3 for one in traced)
        for at_s, stamp_s in zip(times, stamps, strict=True):
            assert stamp_s <= at_s / time_scale + 1e-6
            assert at_s / time_scale < stamp_s + BIN_S + 1e-6

    def test_different_blocks_are_different_tokens(self):
        assert shared(block_tokens(0, 1, 64, 1000).tolist(), block_tokens(0, 2, 64, 1000).tolist()) < 5
        assert block_tokens(0, 1, 64, 1000).tolist() == block_tokens(0, 1, 128, 1000).tolist()[:64]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"time_scale": 0.0}, "time_scale is 0"),
            ({"length_scale": float("nan")}, "length_scale is nan"),
            ({"max_context_tokens": 600}, "request 2: 600 \\+ 9 tokens are more than a context of 600"),
        ],
    )
    def test_what_cannot_be_sent_is_refused(self, change: dict, said: str):
        traced = [TracedRequest(0, 5, 5, (1,)), TracedRequest(1, 600, 9, (1, 2))]
        with pytest.raises(WorkloadError, match=said):
            from_trace(traced, **(CONTEXT | change))

    def test_stamps_that_go_back_are_refused_with_their_number(self):
        with pytest.raises(WorkloadError, match="request 2: its timestamp is less"):
            from_trace([TracedRequest(5, 5, 5, (1,)), TracedRequest(4, 5, 5, (1,))], **CONTEXT)

    def test_what_is_too_long_is_cut_and_counted_where_that_is_wanted(self):
        traced = [TracedRequest(0, 5, 5, (1,)), TracedRequest(1, 600, 9, (1, 2)), TracedRequest(2, 5, 900, (3,))]
        found = from_trace(traced, vocab_size=10, max_context_tokens=600, clips=True)
        assert found.num_clipped == 2
        lengths = {(len(r.prompt), r.max_tokens) for r in found.requests}
        assert lengths == {(5, 5), (591, 9), (1, 599)}


class TestArrivals:
    @pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 3.0])
    def test_intervals_have_the_mean_and_the_variation_that_were_asked_for(self, variation: float):
        times = list(islice(gamma(20.0, variation, Random(0)), 20_001))
        gaps = [after - before for before, after in pairwise(times)]
        assert times[0] == 0
        assert mean(gaps) == pytest.approx(1 / 20, rel=0.1)
        assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.1, abs=1e-9)

    @pytest.mark.parametrize(("rate", "variation", "said"), [(0.0, 1.0, "rate_per_s"), (1.0, -1.0, "variation")])
    def test_nonsense_is_refused(self, rate: float, variation: float, said: str):
        with pytest.raises(WorkloadError, match=said):
            gamma(rate, variation, Random(0))


class TestFixed:
    def test_open_and_closed_have_the_same_fresh_prompts(self):
        options = {"num_prompt": 7, "num_output": 3, "num_requests": 10, "vocab_size": VOCAB_SIZE, "seed": 4}
        opened, shut = fixed(rate_per_s=5.0, **options), fixed(num_clients=3, **options)
        prompts = [request.prompt.tokens() for request in opened.requests]
        assert prompts == [request.prompt.tokens() for request in shut.requests]
        assert len({tuple(prompt) for prompt in prompts}) == 10
        assert opened.num_prompt_tokens == 70
        assert opened.is_open
        assert not shut.is_open
        assert [request.after for request in shut.requests] == [None, None, None, *range(7)]

    @pytest.mark.parametrize("name", ["num_prompt", "num_output", "num_requests", "num_clients"])
    def test_nothing_is_refused(self, name: str):
        options = {"num_prompt": 1, "num_output": 1, "num_requests": 1, "vocab_size": 9, name: 0}
        with pytest.raises(WorkloadError, match=name):
            fixed(**options)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=4), max_size=8),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.5)),
)
def test_turns_follow_each_other_and_clients_play_one_session_at_a_time(prompts, num_clients: int, think_s: float):
    found = sessions(prompts, max_tokens=2, num_clients=num_clients, mean_think_s=think_s).requests
    assert [request.prompt.tokens() for request in found] == [turn for session in prompts for turn in session]
    under_way = [request for request in found if request.after is None]
    assert len(under_way) == min(num_clients, len(prompts))
    followed = [request.after for request in found if request.after is not None]
    assert len(set(followed)) == len(followed)  # nobody is waited for by two
    for request in found:
        if request.turn:
            assert request.after is not None
            before = found[request.after]
            assert (before.session, before.turn) == (request.session, request.turn - 1)
            assert (request.pause_s > 0) == (think_s > 0)


class TestPrompts:
    def test_lines_come_at_their_times_or_one_after_another(self, tmp_path: Path):
        path = tmp_path / "prompts.jsonl"
        lines = [{"prompt": [1, 2], "max_tokens": 3}, {"prompt": [4], "max_tokens": 1}]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
        first, second = from_prompts(path, max_context_tokens=10).requests
        assert (first.prompt.tokens(), first.at_s, second.after) == ([1, 2], 0.0, 0)
        path.write_text(json.dumps(lines[0] | {"at_s": 1.5}))
        assert from_prompts(path, max_context_tokens=10).requests[0].at_s == 1.5

    def test_a_prompt_that_does_not_fit_is_refused_or_cut(self, tmp_path: Path):
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps({"prompt": [1, 2, 3, 4], "max_tokens": 3}))
        with pytest.raises(WorkloadError, match="line 1: more than a context of 6 tokens"):
            from_prompts(path, max_context_tokens=6)
        found = from_prompts(path, max_context_tokens=6, clips=True)
        assert (found.requests[0].prompt.tokens(), found.num_clipped) == ([1, 2, 3], 1)

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("{", "line 2: "),
            ("[]", "line 2: expected an object"),
            ('{"prompt": "text", "max_tokens": 1}', "line 2: prompt is not a list of token ids"),
            ('{"prompt": [], "max_tokens": 1}', "line 2: prompt is not a list of token ids"),
            ('{"prompt": [-1], "max_tokens": 1}', "line 2: prompt is not a list of token ids"),
            ('{"prompt": [1], "max_tokens": 0}', "line 2: max_tokens is 0"),
            ('{"prompt": [1], "max_tokens": 1, "at_s": -1}', "line 2: at_s is -1"),
        ],
    )
    def test_a_broken_line_is_refused_with_its_number(self, tmp_path: Path, line: str, said: str):
        path = tmp_path / "prompts.jsonl"
        path.write_text(f'{{"prompt": [1], "max_tokens": 1}}\n{line}\n')
        with pytest.raises(WorkloadError, match=said):
            from_prompts(path, max_context_tokens=10)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({}, "exactly one of"),
        ({"at_s": 0.0, "after": 0}, "exactly one of"),
        ({"at_s": -1.0}, "at_s is -1"),
        ({"after": 1}, "after is 1"),
    ],
)
def test_a_plan_that_no_runner_could_follow_is_refused(times: dict, said: str):
    first = Planned(prompt=Tokens((1,)), max_tokens=1, at_s=0.0)
    with pytest.raises(WorkloadError, match=f"request 1: .*{said}"):
        check([first, Planned(prompt=Tokens((1,)), max_tokens=1, **times)])


def test_a_closed_loop_without_requests_is_none():
    assert closed([], 5, 3).requests == []
