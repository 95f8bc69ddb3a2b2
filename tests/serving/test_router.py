import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.router import Router

WORKERS = ["a", "b", "c"]


def test_no_workers_give_no_reservation():
    assert Router().reserve([], 10) is None


def test_a_burst_is_spread_before_any_of_it_ends():
    router = Router()
    chosen = [router.reserve(WORKERS, 100) for _ in range(6)]
    assert sorted(r.worker for r in chosen if r) == ["a", "a", "b", "b", "c", "c"]


def test_long_prompts_weigh_more_than_many_requests():
    router = Router()
    router.reserve(["a"], 32_000)
    assert {r.worker for r in (router.reserve(["a", "b"], 100) for _ in range(10)) if r} == {"b"}


def test_idle_workers_take_turns():
    router = Router()
    chosen = []
    for _ in range(6):
        reservation = router.reserve(WORKERS, 5)
        assert reservation is not None
        chosen.append(reservation.worker)
        router.release(reservation)
    assert chosen == ["a", "b", "c"] * 2


def test_legs_of_requests_do_not_take_the_turns_of_one_another():
    router = Router()
    chosen = []
    for _ in range(4):
        decode, prefill = router.reserve(["d1", "d2"], 100), router.reserve(["p1", "p2"], 7)
        assert decode is not None
        assert prefill is not None
        chosen.append((decode.worker, prefill.worker))
        router.release(prefill)
    assert chosen == [("d1", "p1"), ("d2", "p2")] * 2
    assert [router.in_flight_tokens(worker) for worker in ("d1", "d2", "p1", "p2")] == [200, 200, 0, 0]


def test_a_reservation_is_released_once():
    router = Router()
    reservation = router.reserve(WORKERS, 5)
    assert reservation is not None
    router.release(reservation)
    with pytest.raises(KeyError):
        router.release(reservation)


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), max_size=60))
def test_tokens_in_flight_are_those_of_the_open_reservations(steps: list[tuple[int, bool]]):
    router = Router()
    open_reservations = []
    for num_tokens, then_release in steps:
        reservation = router.reserve(WORKERS, num_tokens)
        assert reservation is not None
        open_reservations.append(reservation)
        if then_release:
            router.release(open_reservations.pop(0))
        for worker in WORKERS:
            expected = sum(r.num_tokens for r in open_reservations if r.worker == worker)
            assert router.in_flight_tokens(worker) == expected
    for reservation in open_reservations:
        router.release(reservation)
    assert [router.in_flight_tokens(worker) for worker in WORKERS] == [0, 0, 0]
