from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.router import Home, Router


def homes(*names: str) -> list[Home]:
    """`a` is the first partition of worker a, `a1` its second."""
    return [Home(name[0], int(name[1:] or 0)) for name in names]


HOMES = homes("a", "b", "b1")


def test_no_workers_give_no_reservation():
    assert Router().reserve([], 10) is None


def test_a_burst_is_spread_before_any_of_it_ends():
    router = Router()
    chosen = [router.reserve(HOMES, 100) for _ in range(6)]
    assert Counter(r.home for r in chosen if r) == dict.fromkeys(HOMES, 2)


def test_long_prompts_weigh_more_than_many_requests():
    router = Router()
    router.reserve(homes("a"), 32_000)
    assert {r.home for r in (router.reserve(homes("a", "a1"), 100) for _ in range(10)) if r} == {Home("a", 1)}


def test_idle_workers_take_turns():
    router = Router()
    chosen = []
    for _ in range(6):
        reservation = router.reserve(HOMES, 5)
        assert reservation is not None
        chosen.append(reservation.home)
        router.release(reservation)
    assert chosen == HOMES * 2


def test_legs_of_requests_do_not_take_the_turns_of_one_another():
    router = Router()
    chosen = []
    for _ in range(4):
        decode, prefill = router.reserve(homes("d", "d1"), 100), router.reserve(homes("p", "p1"), 7)
        assert decode is not None
        assert prefill is not None
        chosen.append((decode.home, prefill.home))
        router.release(prefill)
    assert chosen == list(zip(homes("d", "d1"), homes("p", "p1"), strict=True)) * 2
    assert [router.in_flight_tokens(home) for home in homes("d", "d1", "p", "p1")] == [200, 200, 0, 0]
    assert (router.worker_tokens("d"), router.worker_tokens("p")) == (400, 0)


def test_a_reservation_is_released_once():
    router = Router()
    reservation = router.reserve(HOMES, 5)
    assert reservation is not None
    router.release(reservation)
    with pytest.raises(KeyError):
        router.release(reservation)


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), max_size=60))
def test_tokens_in_flight_are_those_of_the_open_reservations(steps: list[tuple[int, bool]]):
    router = Router()
    open_reservations = []
    for num_tokens, then_release in steps:
        reservation = router.reserve(HOMES, num_tokens)
        assert reservation is not None
        open_reservations.append(reservation)
        if then_release:
            router.release(open_reservations.pop(0))
        for home in HOMES:
            expected = sum(r.num_tokens for r in open_reservations if r.home == home)
            assert router.in_flight_tokens(home) == expected
    for reservation in open_reservations:
        router.release(reservation)
    assert [router.in_flight_tokens(home) for home in HOMES] == [0, 0, 0]
