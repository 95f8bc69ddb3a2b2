"""A trace's workload is what its lines say: lengths, times, what begins alike; what is wrong is told by its line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest, read_trace
from moonshard.experiments.workload.blocks import BlockPrompt, block_tokens
from moonshard.experiments.workload.plan import Planned, WorkloadError
from moonshard.experiments.workload.trace import bin_s, from_trace

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


@given(traces(), st.floats(0.05, 2), st.floats(0.1, 3), st.integers(0, 5))
def test_what_begins_alike_in_the_trace_begins_alike_here(
    traced: list[TracedRequest], length_scale: float, time_scale: float, seed: int
):
    found = from_trace(traced, length_scale=length_scale, time_scale=time_scale, seed=seed, **CONTEXT).requests
    size = max(1.0, BLOCK_TOKENS * length_scale)
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
            common = min(len(one.prompt), len(other.prompt), round(same * size))
            assert shared(one.prompt.tokens(), other.prompt.tokens()) >= common


@given(traces(), st.floats(0.1, 3), st.integers(0, 5))
def test_requests_come_within_the_bins_of_their_stamps_and_in_order(traced, time_scale: float, seed: int):
    found = from_trace(traced, jitter_s=3.0, time_scale=time_scale, seed=seed, **CONTEXT)
    times = [request.at_s for request in found.requests if request.at_s is not None]
    assert found.is_open
    assert times == sorted(times)
    stamps = [(one.timestamp_ms - traced[0].timestamp_ms) / 1e3 for one in traced]
    for at_s, stamp_s in zip(times, stamps, strict=True):
        assert stamp_s <= at_s / time_scale + 1e-6
        assert at_s / time_scale < stamp_s + 3 + 1e-6


def test_different_blocks_are_different_tokens():
    assert shared(block_tokens(0, 1, 64, 1000).tolist(), block_tokens(0, 2, 64, 1000).tolist()) < 5
    assert block_tokens(0, 1, 64, 1000).tolist() == block_tokens(0, 1, 128, 1000).tolist()[:64]
    largest = [block_tokens(0, number, 64, 1000).tolist() for number in (2**63 + 5, 2**63 + 6, 2**64 - 1)]
    assert len(set(map(tuple, largest))) == 3


@pytest.mark.parametrize("length_scale", [0.005, 0.02, 0.05, 0.3, 1.7])
def test_prompts_that_differ_in_their_last_block_differ_at_any_scale(length_scale: float):
    """However blocks are rounded: what is rounded away must not be what tells them apart."""
    alike = tuple(range(99))
    traced = [TracedRequest(0.0, 100 * BLOCK_TOKENS, 1, (*alike, last)) for last in (1000, 1001)]
    one, other = from_trace(traced, length_scale=length_scale, vocab_size=VOCAB_SIZE, max_context_tokens=10**6).requests
    assert len(one.prompt) == len(other.prompt) == round(100 * BLOCK_TOKENS * length_scale)
    assert shared(one.prompt.tokens(), other.prompt.tokens()) < len(one.prompt)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time_scale": 0.0}, "time_scale is 0"),
        ({"length_scale": float("nan")}, "length_scale is nan"),
        ({"max_context_tokens": 600}, "a request: 600 \\+ 9 tokens are more than a context of 600"),
    ],
)
def test_what_cannot_be_sent_is_refused(change: dict, said: str):
    traced = [TracedRequest(0, 5, 5, (1,)), TracedRequest(1, 600, 9, (1, 2))]
    with pytest.raises(WorkloadError, match=said):
        from_trace(traced, **(CONTEXT | change))


def test_stamps_that_go_back_are_refused():
    with pytest.raises(WorkloadError, match="a request: its timestamp is less"):
        from_trace([TracedRequest(5, 5, 5, (1,)), TracedRequest(4, 5, 5, (1,))], **CONTEXT)


def test_what_is_too_long_is_told_by_the_line_of_its_file(tmp_path: Path):
    lines = [
        '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}',
        "",
        '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}',
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    traced = read_trace(tmp_path / "trace.jsonl")
    with pytest.raises(WorkloadError, match=r"line 3: 600 \+ 5 tokens are more than a context of 600"):
        from_trace(traced, vocab_size=9, max_context_tokens=600)


@pytest.mark.parametrize(("stamps_ms", "expected_s"), [((0, 3000, 9000), 3.0), ((0, 3000, 9001), 0.0), ((0, 500), 0.0)])
def test_stamps_are_as_exact_as_they_look(stamps_ms: tuple[int, ...], expected_s: float):
    assert bin_s([TracedRequest(stamp, 5, 5, (1,)) for stamp in stamps_ms]) == expected_s


def test_without_jitter_requests_come_at_their_stamps():
    found = from_trace([TracedRequest(stamp, 5, 5, (1,)) for stamp in (0, 1234, 3000)], time_scale=0.5, **CONTEXT)
    assert [request.at_s for request in found.requests] == [0.0, 0.617, 1.5]


def test_a_slice_of_a_trace_begins_at_once_whatever_its_stamps_count_from():
    found = from_trace([TracedRequest(1.7e12 + stamp, 5, 5, (1,)) for stamp in (0, 1000, 3000)], **CONTEXT)
    assert [request.at_s for request in found.requests] == [0.0, 1.0, 3.0]


def test_a_stamp_that_nobody_lives_to_see_is_refused():
    with pytest.raises(WorkloadError, match=r"a request: comes 2e\+09 s after the first one"):
        from_trace([TracedRequest(stamp, 5, 5, (1,)) for stamp in (0, 2e12)], **CONTEXT)


def test_what_is_too_long_is_cut_and_counted_where_that_is_wanted():
    traced = [TracedRequest(0, 5, 5, (1,)), TracedRequest(1, 600, 9, (1, 2)), TracedRequest(2, 5, 900, (3,))]
    found = from_trace(traced, vocab_size=10, max_context_tokens=600, clips=True)
    assert found.num_clipped == 2
    lengths = {(len(r.prompt), r.max_tokens) for r in found.requests}
    assert lengths == {(5, 5), (591, 9), (1, 599)}
