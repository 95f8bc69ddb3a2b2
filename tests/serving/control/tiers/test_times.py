"""A fitted time is the line that the newest sights lie on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.tiers.times import FittedTime


def test_nothing_seen_is_nothing_known():
    assert FittedTime().seconds(3) is None


@given(
    fixed_s=st.floats(0, 1), per_unit_s=st.floats(0, 1), amounts=st.lists(st.integers(1, 100), min_size=3, max_size=30)
)
def test_a_line_is_found_again(fixed_s: float, per_unit_s: float, amounts: list[int]):
    fitted = FittedTime()
    for amount in [*amounts, 1, 200]:
        fitted.note(amount, fixed_s + per_unit_s * amount)
    for amount in (1, 10, 300):
        assert fitted.seconds(amount) == pytest.approx(fixed_s + per_unit_s * amount, rel=1e-3, abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 10)), min_size=1, max_size=20), st.integers(0, 100))
def test_nothing_takes_less_than_no_time_nor_more_of_it_less(seen: list[tuple[int, float]], amount: int):
    fitted = FittedTime()
    for one, seconds in seen:
        fitted.note(one, seconds)
    less, more = fitted.seconds(amount), fitted.seconds(amount + 1)
    assert less is not None
    assert more is not None
    assert 0 <= less <= more + 1e-9


def test_what_has_become_slower_is_seen_after_a_while():
    fitted = FittedTime()
    for _ in range(1000):
        fitted.note(10, 1.0)
    for _ in range(60):
        fitted.note(10, 5.0)
    seconds = fitted.seconds(10)
    assert seconds is not None
    assert seconds > 4.5


def test_sights_of_one_amount_are_taken_to_be_in_proportion():
    fitted = FittedTime()
    for _ in range(5):
        fitted.note(10, 1.0)
    assert fitted.seconds(5) == pytest.approx(0.5)
