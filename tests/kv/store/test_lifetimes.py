"""The life table against counting, and hit density against every age at which a block could be given up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.kv.store import lifetimes
from moonshard.kv.store.lifetimes import NUM_BINS, Lifetimes, bin_of, first_age

PRIOR_BLOCKS, PRIOR_CHANCE = 4.0, 0.1
lives = st.lists(st.tuples(st.integers(0, 1 << 20), st.booleans()), max_size=20)


def life_table(seen: list[tuple[int, bool]]) -> Lifetimes:
    """Of blocks that were used at an age, or not until then."""
    found = Lifetimes()
    for age, is_used in seen:
        (found.used if is_used else found.unseen)(age)
    return found


def chance(seen: list[tuple[int, bool]], age_bin: int) -> float:
    came = sum(age >= first_age(age_bin) for age, _ in seen)
    used = sum(is_used and first_age(age_bin) <= age < first_age(age_bin + 1) for age, is_used in seen)
    return (used + PRIOR_BLOCKS * PRIOR_CHANCE) / (came + PRIOR_BLOCKS)


def uses_for_the_time(chances: list[float], start: int, end: int) -> float:
    """Given up at the end of bin `end`: every way in which it can go, and how likely that is."""
    uses = time = 0.0
    left = 1.0
    for age_bin in range(start, end + 1):
        used = left * chances[age_bin]
        uses += used
        time += used * ((first_age(age_bin) + first_age(age_bin + 1)) / 2 - first_age(start))
        left -= used
    return uses / (time + left * (first_age(end + 1) - first_age(start)))


def test_the_prior_is_what_it_is_taken_to_be_here():
    assert (PRIOR_BLOCKS, PRIOR_CHANCE) == (lifetimes._PRIOR_BLOCKS, lifetimes._PRIOR_CHANCE)


@settings(max_examples=40)
@given(lives, st.integers(0, NUM_BINS - 1))
def test_density_is_that_of_the_best_age_to_give_up_at(seen: list, start: int):
    chances = [chance(seen, age_bin) for age_bin in range(NUM_BINS)]
    every = [uses_for_the_time(chances, start, end) for end in range(start, NUM_BINS)]
    assert life_table(seen).densities()[start] == pytest.approx(max(every))


@given(st.integers(0, 1 << 40))
def test_an_age_is_in_the_bin_that_begins_before_it(age: int):
    assert first_age(bin_of(age)) <= age
    assert age < first_age(bin_of(age) + 1) or bin_of(age) == NUM_BINS - 1


def test_with_nothing_seen_the_older_is_worth_less():
    densities = Lifetimes().densities()
    assert densities[1:] == sorted(densities[1:], reverse=True)


def test_a_use_that_is_due_later_is_worth_waiting_for_until_it_is_over():
    densities = life_table([(1000, True)] * 50).densities()
    due = bin_of(1000)
    assert densities[bin_of(700)] > densities[bin_of(30)] > 0.5 / 1000
    assert densities[due + 1] < densities[bin_of(30)] / 4


def test_what_was_not_seen_any_more_is_not_taken_to_be_unused():
    """Half of those that came to age 1,000 were used there, however many were lost sight of before."""
    seen = [(1000, True), (2000, False)] * 50
    early = [(10, False)] * 1000
    at = bin_of(1000)
    assert life_table(seen + early).densities()[at] == pytest.approx(life_table(seen).densities()[at])


def test_old_sights_count_less_and_less():
    table = life_table([(100, True)] * 1000)
    before = table.densities()[bin_of(100)]
    for _ in range(200):
        table.forget()
    assert table.densities()[bin_of(100)] < before / 4
    assert table.densities() == pytest.approx(Lifetimes().densities(), rel=1e-4)
