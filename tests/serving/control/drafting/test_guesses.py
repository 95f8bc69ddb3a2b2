"""What guesses for one sequence, in which order, and how failures make it rest."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.drafting.fit import NUM_JUDGED, DraftFit
from moonshard.serving.control.drafting.guesses import FIRST_REST, LONGEST_REST, Guesses
from moonshard.serving.control.drafting.lookup import LONGEST, SHORTEST, Lookup
from moonshard.serving.control.drafting.worth import Worth
from moonshard.serving.control.plan import DecodePlan, DecodeRow
from moonshard.serving.control.request import Request, SequenceId, SlotId

MOST = 3


def forced(*tokens: int):
    return lambda generated, most: tokens[:most]


def test_a_draft_model_is_asked_for_nothing_where_there_is_none():
    assert Guesses(None, None).num_ahead(5) == 0
    assert Guesses(None, None, MOST).num_ahead(5) == MOST


def test_what_a_draft_model_says_counts_only_behind_the_tokens_that_it_followed():
    guesses = Guesses(None, None, MOST)
    guesses.take_guesses(2, (7, 8, 9))
    assert guesses.propose([1], MOST) == ()
    assert guesses.propose([1, 2], MOST) == (7, 8, 9)
    assert guesses.propose([1, 2], 2) == (7, 8)
    assert guesses.propose([1, 2, 3], MOST) == ()


@pytest.mark.parametrize(
    ("alone", "following", "expected"),
    [
        ((7,), (7, 8, 9), (7, 8, 9)),  # it goes on from what the grammar alone allows
        ((7,), (6, 8, 9), (7,)),  # it would have gone elsewhere
        ((7, 8, 9), (7, 8), (7, 8, 9)),
        ((), (7, 8, 9), (7, 8, 9)),
        ((7,), (), (7,)),
    ],
)
def test_the_grammar_goes_before_a_draft_model(alone, following, expected):
    guesses = Guesses(forced(*alone), None, MOST)
    guesses.take_guesses(1, following)
    assert guesses.propose([1], MOST) == expected


def test_lookup_goes_on_where_a_draft_model_says_nothing():
    guesses = Guesses(None, Lookup([1, 2, 3, 4, 5, 1]), MOST)
    assert guesses.propose([2], MOST) == (3, 4, 5)
    guesses.take_guesses(1, (8, 9))
    assert guesses.propose([2], MOST)[:2] == (8, 9)


def tokens_of_a_loop(num: int) -> list[int]:
    return [place % 7 for place in range(num)]


def test_lookup_goes_first_where_it_has_been_right_more_often_and_then_the_model_is_not_asked():
    guesses = Guesses(None, Lookup(tokens_of_a_loop(21)), MOST)
    num_known, was_asked = 0, list[bool]()
    for _ in range(12):
        was_asked.append(guesses.num_ahead(num_known) > 0)
        if was_asked[-1]:
            guesses.take_guesses(num_known, (90, 91, 92))
        known = tokens_of_a_loop(21 + num_known)[21:]
        right = guesses.propose(known, MOST)[:1] == (num_known % 7,)
        num_known += 1 + MOST * right
    assert was_asked[0]
    assert not any(was_asked[-4:])
    assert guesses.propose(tokens_of_a_loop(21 + num_known)[21:], MOST)[0] == num_known % 7


def test_the_model_is_asked_again_where_lookup_finds_nothing_any_more():
    guesses = Guesses(None, Lookup(tokens_of_a_loop(21)), MOST)
    looping = tokens_of_a_loop(80)[21:]
    for num_known in range(0, 40, 4):
        guesses.propose(looping[:num_known], MOST)
    assert guesses.num_ahead(40) == 0
    others = [*looping[:40], *range(100, 130)]
    for num_known in range(41, 60):
        guesses.propose(others[:num_known], MOST)
    assert guesses.num_ahead(60) == MOST


def test_a_model_that_is_right_goes_before_lookup_that_is_not():
    """What stands before each of these tokens went on otherwise the last time."""
    guesses, known = Guesses(None, Lookup([1, 2, 9]), MOST), list[int]()
    for count in range(12):
        guesses.take_guesses(len(known), (1, 2, 10 + count))
        if count:
            assert Lookup([1, 2, 9]).propose([*known, 1, 2], (), 1) != (10 + count,)
        assert guesses.propose(known, MOST) == (1, 2, 10 + count)
        assert guesses.num_ahead(len(known)) == MOST
        known += [1, 2, 10 + count, 1, 2, 50 + count]


def rests_after_failures(guesses: Guesses, num: int) -> list[int]:
    """How many tokens it lets pass without a guess, rest by rest, while no guess is right."""
    rests, count = list[int](), 0
    while len(rests) < num:
        guesses.take_guesses(count, (1, 2, 3))
        assert guesses.propose([0] * count, MOST)
        guesses.note(MOST, 0)
        rest = next(rest for rest in range(LONGEST_REST + 1) if guesses.is_eager(count + rest))
        assert guesses.num_ahead(count) == (0 if rest else MOST)
        rests += [rest] if rest else []
        count += max(1, rest)
    return rests


def test_failures_make_it_rest_ever_longer():
    guesses = Guesses(None, None, MOST, worth=Worth())
    assert rests_after_failures(guesses, 4) == [FIRST_REST, 2 * FIRST_REST, LONGEST_REST, LONGEST_REST]
    assert guesses.num_ahead(10_000) == MOST


def test_all_that_rest_as_long_try_again_at_the_same_step():
    """One that tries alone would hardly be worth the others' time; together they may be."""
    row = DecodeRow(SequenceId(b"r", 0), Request(id=b"r", prompt=(1,), max_tokens=9), SlotId(0, 0), 1, (0,))
    worth = Worth()
    for step in range(1, 60):
        worth.note(DecodePlan(number=step, rows=(row,)), 1, step)
        if worth.must_measure:
            continue
        guesses = Guesses(None, None, MOST, worth=worth)
        while guesses.num_ahead(0):
            guesses.take_guesses(0, (1, 2, 3))
            assert guesses.propose([], MOST)
            guesses.note(MOST, 0)
        rest = next(rest for rest in range(1, LONGEST_REST + 1) if guesses.is_eager(rest))
        assert (step + rest) % FIRST_REST == 0


def test_guesses_that_gain_less_than_their_steps_cost_make_it_rest():
    class Dear(Worth):
        def least_accepted(self) -> float:
            return 1.5

    guesses = [Guesses(None, None, MOST, worth=Dear()) for _ in range(2)]
    for count in range(20):
        for each, num_right in zip(guesses, (1, 2), strict=True):
            each.take_guesses(count, (1, 2, 3))
            if each.propose([0] * count, MOST):
                each.note(MOST, num_right)
    assert [each.is_eager(20) for each in guesses] == [False, True]


def test_a_row_that_the_model_was_not_asked_about_tells_nothing_of_it():
    guesses = Guesses(None, None, MOST, worth=Worth())
    for count in range(20):
        assert guesses.propose([0] * count, MOST) == ()
    assert guesses.is_eager(20)


@pytest.mark.parametrize("num_right", [0, 1])
def test_a_model_that_is_hardly_ever_right_does_not_fit(num_right):
    fit = DraftFit()
    guesses = Guesses(forced(7), None, MOST, fit=fit)
    for count in range(2 * NUM_JUDGED):
        guesses.take_guesses(count, (7, 8, 9) if count % 2 else (6,))  # every other guess is the grammar's own
        assert guesses.propose([0] * count, MOST)
        guesses.note(MOST, num_right)
        assert fit.num_drafts == (count + 1) // 2
    assert fit.accept_length == 1 + num_right
    assert fit.is_misfit == (not num_right)


def test_where_the_number_is_given_nothing_rests():
    guesses = Guesses(None, None, MOST)
    for count in range(50):
        guesses.take_guesses(count, (1, 2, 3))
        assert guesses.propose([0] * count, MOST)
        guesses.note(MOST, 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), max_size=12))
def test_lookup_finds_what_followed_the_last_place_where_most_of_the_last_tokens_stood(prompt, generated):
    assert Lookup(prompt).propose(generated, (), MOST) == by_brute_force([*prompt, *generated])


def by_brute_force(tokens: Sequence[int]) -> tuple[int, ...]:
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[end - length : end]) == list(tokens[len(tokens) - length :]):
                repeated = tokens[end:]
                return tuple(repeated[place % len(repeated)] for place in range(MOST))
    return ()
