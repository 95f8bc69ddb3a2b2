"""What guesses for one sequence, in which order, and what it expects to be right about."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.drafting.fit import NUM_JUDGED, DraftFit
from moonshard.serving.control.drafting.guesses import Guesses, Typical
from moonshard.serving.control.drafting.lookup import LONGEST, SHORTEST, Lookup
from moonshard.serving.control.drafting.worth import Worth

MOST = 3


def forced(*tokens: int):
    return lambda generated, most: tokens[:most]


def test_a_draft_model_is_asked_for_nothing_where_there_is_none():
    assert Guesses(None, None).num_ahead == 0
    assert Guesses(None, None, MOST).num_ahead == MOST


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
        was_asked.append(guesses.num_ahead > 0)
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
    assert guesses.num_ahead == 0
    others = [*looping[:40], *range(100, 130)]
    for num_known in range(41, 60):
        guesses.propose(others[:num_known], MOST)
    assert guesses.num_ahead == MOST


def test_a_model_that_is_right_goes_before_lookup_that_is_not():
    """What stands before each of these tokens went on otherwise the last time."""
    guesses, known = Guesses(None, Lookup([1, 2, 9]), MOST), list[int]()
    for count in range(12):
        guesses.take_guesses(len(known), (1, 2, 10 + count))
        if count:
            assert Lookup([1, 2, 9]).propose([*known, 1, 2], (), 1) != (10 + count,)
        assert guesses.propose(known, MOST) == (1, 2, 10 + count)
        assert guesses.num_ahead == MOST
        known += [1, 2, 10 + count, 1, 2, 50 + count]


class Off(Worth):
    def __init__(self):
        super().__init__()
        self.is_on = False


def test_nothing_is_guessed_where_it_is_not_worth_it():
    guesses = Guesses(forced(7), Lookup([1, 2, 3, 1, 2]), MOST, worth=Off())
    guesses.take_guesses(1, (1, 2, 3))
    assert not guesses.is_eager
    assert guesses.num_ahead == 0
    assert guesses.propose([3], MOST) == ()


def test_a_sequence_expects_what_the_best_of_its_sources_was_right_about():
    guesses = Guesses(forced(7), None, MOST)
    for round in range(30):
        guesses.take_guesses(4 * round, (7, 8, 5))
        guesses.propose([7, 8, 9, 5] * round, MOST)
    assert guesses.num_right == pytest.approx(2, abs=0.01)
    assert Guesses(None, None).num_right == 0.0


def test_lookup_is_judged_where_it_is_not_tried():
    guesses = Guesses(None, Lookup(tokens_of_a_loop(21)), worth=Off())
    generated = tokens_of_a_loop(100)[21:]
    for count in range(len(generated)):
        guesses.watch(generated[:count], MOST)
    assert guesses.num_right == pytest.approx(MOST, abs=0.1)
    for count in range(60):
        guesses.watch([*generated, *range(100, 100 + count)], MOST)
    assert guesses.num_right == pytest.approx(0.0, abs=0.1)


def test_a_new_sequence_expects_what_others_were_right_about():
    typical = Typical()
    for _ in range(20):
        old = Guesses(None, Lookup(tokens_of_a_loop(21)), typical=typical)
        generated = tokens_of_a_loop(100)[21:]
        for count in range(0, len(generated), MOST + 1):
            old.propose(generated[:count], MOST)
    assert Guesses(None, Lookup([1]), typical=typical).num_right == pytest.approx(MOST, abs=0.1)
    assert Guesses(None, None, typical=typical).num_right == 0.0


def test_a_model_that_was_not_asked_is_not_judged():
    guesses = Guesses(None, None, MOST)
    before = guesses.num_right
    for count in range(20):
        assert guesses.propose([0] * count, MOST) == ()
    assert guesses.num_right == before


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
