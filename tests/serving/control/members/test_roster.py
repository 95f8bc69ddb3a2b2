"""Registrations against a model: a lease ends when it is not renewed, and an address is whose who answers there."""

from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.members.roster import LEASE_TICKS, Full, Roster, Taken

MAX_WORKERS = 3
ADDRESSES = st.sampled_from(["a:1", "b:1", "c:1", "d:1"])
EPOCHS = st.integers(1, 2)
STEPS = st.one_of(
    st.tuples(st.just("register"), ADDRESSES, EPOCHS, st.none() | EPOCHS),
    st.tuples(st.sampled_from(["renew", "leave"]), ADDRESSES, EPOCHS, st.none()),
    st.tuples(st.just("tick"), st.just(""), st.integers(1, LEASE_TICKS), st.none()),
)


@given(st.lists(STEPS, max_size=60))
def test_a_lease_lasts_as_long_as_it_is_renewed(steps: list[tuple[str, str, int, int | None]]):
    roster, expected, now = Roster(MAX_WORKERS), dict[str, tuple[int, int]](), 0
    for what, address, number, answering in steps:
        has_it = expected.get(address, (0, 0))[0] == number
        if what == "register":
            refusal = roster.register(address, number, answering=answering)
            if address not in expected and len(expected) == MAX_WORKERS:
                assert refusal == Full(MAX_WORKERS)
            elif address in expected and answering not in (None, number):
                assert refusal == Taken(answering)
            else:
                assert refusal is None
                expected[address] = number, now + LEASE_TICKS
        elif what == "renew":
            assert roster.renew(address, number) is has_it
            if has_it:
                expected[address] = number, now + LEASE_TICKS
        elif what == "leave":
            assert roster.leave(address, number) is has_it
            if has_it:
                del expected[address]
        else:
            for _ in range(number):
                now += 1
                ended = {address for address, (_, end) in expected.items() if end <= now}
                assert set(roster.tick()) == ended
                for address in ended:
                    del expected[address]
        assert set(roster.addresses) == expected.keys()


def test_a_restarted_worker_has_its_address_at_once_and_an_impostor_only_once_nobody_answers():
    roster = Roster(MAX_WORKERS)
    assert roster.register("a:1", 1, answering=None) is None
    assert roster.register("a:1", 2, answering=1) == Taken(1)
    assert roster.renew("a:1", 1)
    assert roster.register("a:1", 2, answering=None) is None  # the first one died
    assert not roster.renew("a:1", 1)
    assert roster.register("a:1", 3, answering=3) is None  # whoever answers there has it, whatever was said before


def test_a_renewed_lease_is_as_new():
    roster = Roster(MAX_WORKERS)
    roster.register("a:1", 1, answering=None)
    for _ in range(3):
        assert not any(roster.tick() for _ in range(LEASE_TICKS - 1))
        assert roster.renew("a:1", 1)
    assert [roster.tick() for _ in range(LEASE_TICKS)] == [*[()] * (LEASE_TICKS - 1), ("a:1",)]


def test_no_more_workers_than_allowed_are_registered_and_those_that_are_stay():
    roster = Roster(2)
    for address in ("a:1", "b:1"):
        assert roster.register(address, 1, answering=None) is None
    assert roster.register("c:1", 1, answering=None) == Full(2)
    assert roster.register("a:1", 2, answering=None) is None
    assert roster.leave("b:1", 1)
    assert roster.register("c:1", 1, answering=None) is None
