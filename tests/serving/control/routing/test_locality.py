"""Where a prompt is prefilled follows the recorded times, and each cost that is weighed pushes in its own direction."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moonshard.serving.control.line import Line
from moonshard.serving.control.routing.locality import MAX_ALIKE, MEMORY, Alternatives, Locality, is_short

tokens = st.integers(0, 100_000)
milliseconds = st.floats(0, 1e5)
choices = st.builds(
    Alternatives,
    left_here_tokens=tokens,
    queued_here_tokens=tokens,
    num_decoding=st.integers(0, 256),
    left_there_tokens=tokens,
    queued_there_tokens=tokens,
    moved_tokens=tokens,
)
observations = st.lists(st.tuples(tokens, milliseconds), min_size=4, max_size=60)
ALIKE = Alternatives(
    left_here_tokens=1000,
    queued_here_tokens=0,
    num_decoding=0,
    left_there_tokens=1000,
    queued_there_tokens=0,
    moved_tokens=1000,
)


def line(fixed_ms: float, token_ms: float) -> Line:
    made = Line(MEMORY)
    for num_tokens in (10, 100, 1000, 5000):
        made.observe(num_tokens, fixed_ms + token_ms * num_tokens)
    return made


def locality(here: Line | None = None) -> Locality:
    return Locality(here=here or line(5, 0.2), there=line(5, 0.2), transfer=line(2, 0.01))


@given(st.floats(0, 1e3), st.floats(0, 10), st.lists(tokens, min_size=4, max_size=20), tokens)
def test_a_line_that_was_seen_is_found(fixed_ms: float, token_ms: float, seen: list[int], asked: int):
    assume(max(seen) - min(seen) > 100)
    found = Line(MEMORY)
    for num_tokens in seen:
        found.observe(num_tokens, fixed_ms + token_ms * num_tokens)
    assert found.at(asked) == pytest.approx(fixed_ms + token_ms * asked, rel=1e-3, abs=1)


@given(observations, tokens, tokens)
def test_more_tokens_never_take_less_time_and_never_less_than_none(seen: list, some: int, more: int):
    found = Line(MEMORY)
    for num_tokens, ms in seen:
        found.observe(num_tokens, ms)
    assert 0 <= found.at(min(some, more)) <= found.at(max(some, more))


def test_what_was_seen_long_ago_is_forgotten():
    found = line(0, 5)
    for number in range(600):
        num_tokens = 100 + number % 300
        found.observe(num_tokens, 0.5 * num_tokens)
    assert found.at(1000) == pytest.approx(500, rel=0.05)


def test_prompts_of_one_length_say_what_a_token_takes():
    found = Line(MEMORY)
    for _ in range(5):
        found.observe(512, 256.0)
    assert found.at(1024) == pytest.approx(512)


@given(choices)
def test_before_anything_was_seen_prefill_workers_prefill(choice: Alternatives):
    assert not Locality().is_here(choice)


@given(observations, observations, observations, choices, st.integers(1, 100_000))
def test_each_reason_pulls_in_its_direction(here: list, there: list, transfer: list, choice: Alternatives, more: int):
    known = Locality()
    for line, seen in ((known.here, here), (known.there, there), (known.transfer, transfer)):
        for num_tokens, ms in seen:
            line.observe(num_tokens, ms)

    def is_cheaper_here(changed: Alternatives) -> bool:
        here_ms, there_ms = known.costs_ms(changed)
        return here_ms < there_ms

    def grown(name: str) -> bool:
        return is_cheaper_here(replace(choice, **{name: getattr(choice, name) + more}))

    if is_cheaper_here(choice):
        assert all(map(grown, ("left_there_tokens", "queued_there_tokens", "moved_tokens")))
    else:
        assert not any(map(grown, ("left_here_tokens", "queued_here_tokens", "num_decoding")))


def test_where_nobody_waits_a_prompt_is_not_moved_and_where_many_decode_it_is():
    assert locality().is_here(ALIKE)
    assert not locality().is_here(replace(ALIKE, num_decoding=1))
    assert locality().is_here(replace(ALIKE, num_decoding=16, left_here_tokens=1))
    assert locality().is_here(replace(ALIKE, num_decoding=4, queued_there_tokens=10_000))
    assert not locality(here=line(50, 2)).is_here(ALIKE)


def test_the_side_that_was_not_taken_is_tried_again_unless_it_is_far_worse():
    known = locality()
    taken = [known.is_here(ALIKE) for _ in range(3 * MAX_ALIKE)]
    assert taken.count(False) == 2
    assert taken[MAX_ALIKE] is False
    assert all(known.is_here(replace(ALIKE, queued_there_tokens=10_000)) for _ in range(3 * MAX_ALIKE))


@pytest.mark.parametrize(("left", "expected"), [(1, True), (64, True), (65, False), (1000, False)])
def test_by_the_static_rule_a_short_rest_is_prefilled_here(left: int, expected: bool):
    assert is_short(1000, left, max_left_tokens=64, min_known_share=1) is expected


@pytest.mark.parametrize(("left", "expected"), [(1, True), (100, True), (101, False), (1000, False)])
def test_by_the_static_rule_a_prompt_known_here_is_prefilled_here(left: int, expected: bool):
    assert is_short(1000, left, max_left_tokens=0, min_known_share=0.9) is expected
