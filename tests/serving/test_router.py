"""Decisions of the router: tokens and not requests, what is known of a prompt, and everything released once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving import policies
from moonshard.serving.affinity import Pins
from moonshard.serving.router import Ask, Home, Reservation, Router

BLOCK = 64


def homes(*names: str) -> list[Home]:
    """`a` is the first partition of worker a, `a1` its second."""
    return [Home(name[0], int(name[1:] or 0)) for name in names]


HOMES = homes("a", "b", "b1")


def take(router: Router, among: list[Home], num_tokens: int = 5, **options) -> Reservation:
    reservation = router.reserve(among, Ask(num_tokens=num_tokens), **options)
    assert reservation is not None
    return reservation


def names(*text: str) -> list[bytes]:
    return [part.encode() for part in text]


def prompt(num_blocks: int, **options) -> Ask:
    """Named p0, p1, ..."""
    num_tokens, own = num_blocks * BLOCK, names(*(f"p{i}" for i in range(num_blocks)))
    return Ask(num_tokens=num_tokens, num_prompt=num_tokens, is_prefill=True, names=own, **options)


def knows(router: Router, home: Home, num_blocks: int) -> None:
    for i in range(num_blocks):
        router.index.add(router.home_number(home), b"p%d" % i)


def test_no_workers_give_no_reservation():
    assert Router().reserve([], Ask(num_tokens=10)) is None


def test_a_burst_is_spread_before_any_of_it_ends():
    router = Router()
    chosen = [take(router, HOMES, 100) for _ in range(6)]
    assert Counter(r.home for r in chosen) == dict.fromkeys(HOMES, 2)


def test_long_prompts_weigh_more_than_many_requests():
    router = Router()
    take(router, homes("a"), 32_000)
    assert {take(router, homes("a", "a1"), 100).home for _ in range(10)} == {Home("a", 1)}


def test_idle_workers_take_turns():
    router, chosen = Router(), []
    for _ in range(6):
        reservation = take(router, HOMES)
        chosen.append(reservation.home)
        router.release(reservation)
    assert chosen == HOMES * 2


def test_legs_of_requests_do_not_take_the_turns_of_one_another():
    router, chosen = Router(), []
    for _ in range(4):
        decode, prefill = take(router, homes("d", "d1"), 100), take(router, homes("p", "p1"), 7)
        chosen.append((decode.home, prefill.home))
        router.release(prefill)
    assert chosen == list(zip(homes("d", "d1"), homes("p", "p1"), strict=True)) * 2
    assert [router.in_flight_tokens(home) for home in homes("d", "d1", "p", "p1")] == [200, 200, 0, 0]
    assert (router.worker_tokens("d"), router.worker_tokens("p")) == (400, 0)


def test_a_reservation_is_released_once():
    router = Router()
    reservation = take(router, HOMES)
    router.release(reservation)
    with pytest.raises(KeyError):
        router.release(reservation)


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans(), st.booleans()), max_size=60))
def test_tokens_in_flight_are_those_of_the_open_reservations(steps: list[tuple[int, bool, bool]]):
    router = Router()
    open_reservations = []
    for num_tokens, is_seen, then_release in steps:
        open_reservations.append(take(router, HOMES, num_tokens))
        if is_seen:
            router.seen(open_reservations[-1])
        if then_release:
            router.release(open_reservations.pop(0))
        for home in HOMES:
            expected = sum(r.num_tokens for r in open_reservations if r.home == home)
            assert router.in_flight_tokens(home) == expected
    for reservation in open_reservations:
        router.release(reservation)
    assert [router.in_flight_tokens(home) for home in HOMES] == [0, 0, 0]


def test_two_routers_that_hear_the_same_reports_share_the_load():
    first, second = Router(), Router()
    for router in (first, second):
        router.report(Home("a", 0), 1000)
        router.report(Home("b", 0), 0)
    assert take(first, homes("a", "b"), 100).home == take(second, homes("a", "b"), 100).home == Home("b", 0)


def test_what_a_worker_has_not_seen_is_added_to_what_it_reports_and_counted_once():
    router = Router()
    for home in homes("a", "b"):
        router.report(home, 0)
    mine = take(router, homes("a", "b"), 100)
    other = next(home for home in homes("a", "b") if home != mine.home)
    assert take(router, homes("a", "b"), 60).home == other
    router.seen(mine)
    router.report(mine.home, 50)  # some of it is done
    assert take(router, homes("a", "b"), 5).home == mine.home
    router.silent(mine.home)  # now all 105 count
    assert take(router, homes("a", "b"), 5).home == other


def test_cost_goes_where_the_prompt_is_known_until_the_queue_there_is_long():
    a, b = homes("a", "b")
    for queued, chosen in ((0, a), (2 * 3 * BLOCK - 1, a), (2 * 3 * BLOCK + 1, b)):
        router = Router(queue_weight=0.5)
        knows(router, a, 3)
        router.report(b, 0)
        router.report(a, queued)
        reservation = router.reserve([b, a], prompt(4), policy=policies.cost)
        assert reservation is not None
        assert reservation.home == chosen
        assert reservation.num_known_tokens == (3 * BLOCK if chosen == a else 0)
        router.release(reservation)


def test_idle_homes_share_out_sessions_that_one_of_them_knows_a_little_better():
    router, chosen = Router(), Counter[str]()
    knows(router, Home("a", 0), 1)  # a system prompt
    for number in range(60):
        own = names("p0", *(f"{number} {i}" for i in range(9)))
        ask = Ask(num_tokens=10 * BLOCK, num_prompt=10 * BLOCK, is_prefill=True, names=own)
        reservation = router.reserve(homes("a", "b", "c"), ask, policy=policies.cost, now_s=0.1 * number)
        assert reservation is not None
        chosen[reservation.home.worker] += 1
        router.release(reservation)
    assert max(chosen.values()) <= 1.2 * 60 / 3


def test_what_a_home_was_given_long_ago_counts_no_more():
    router, ask = Router(), prompt(4)
    knows(router, Home("a", 0), 1)
    for _ in range(100):
        reservation = router.reserve(homes("a"), ask, policy=policies.cost, now_s=0.0)
        assert reservation is not None
        router.release(reservation)
    found = [router.reserve(homes("a", "b"), ask, policy=policies.cost, now_s=now_s) for now_s in (1.0, 3600.0)]
    assert [reservation and reservation.home.worker for reservation in found] == ["b", "a"]


def test_a_prompt_known_whole_leaves_its_last_token():
    router = Router()
    knows(router, Home("a", 0), 4)
    reservation = router.reserve(homes("a"), prompt(4), policy=policies.cost)
    assert reservation is not None
    assert reservation.num_known_tokens == 4 * BLOCK - 1


def test_a_session_stays_where_it_is_unless_that_home_is_overloaded_or_away():
    router = Router(pins=Pins())
    everywhere, key = homes("a", "b", "c"), b"session"
    for home in everywhere:
        router.report(home, 0)
    outcomes = []

    def ask(among: list[Home]) -> Home:
        reservation = router.reserve(among, prompt(4, session=key), policy=policies.cost, now_s=1.0)
        assert reservation is not None
        router.sent(reservation, now_s=1.0)
        router.release(reservation)
        outcomes.append(reservation.affinity)
        return reservation.home

    first = ask(everywhere)
    assert ask(everywhere) == first
    router.report(first, 100 * BLOCK)
    second = ask(everywhere)
    assert second != first
    assert ask(everywhere) == second
    assert ask([first]) == first  # the pinned one is away
    assert outcomes == ["miss", "hit", "moved", "hit", "moved"]


def test_a_request_that_is_never_sent_moves_no_session():
    router = Router(pins=Pins())

    def ask(among: list[Home], *, is_sent: bool) -> str | None:
        reservation = router.reserve(among, prompt(4, session=b"session"), policy=policies.cost, now_s=1.0)
        assert reservation is not None
        if is_sent:
            router.sent(reservation, now_s=1.0)
        router.release(reservation)
        return reservation.affinity

    assert [ask(homes("a", "b"), is_sent=is_sent) for is_sent in (False, True)] == ["miss", "miss"]
    (first,) = [home for home in homes("a", "b") if ask([home], is_sent=False) == "hit"]
    (other,) = [home for home in homes("a", "b") if home != first]
    assert [ask([other], is_sent=False), ask([first], is_sent=False)] == ["moved", "hit"]
    assert router.worker_tokens("a") == router.worker_tokens("b") == 0


def test_without_a_session_nothing_is_pinned():
    router = Router(pins=(pins := Pins()))
    reservation = take(router, HOMES)
    router.sent(reservation, now_s=0.0)
    assert reservation.affinity is None
    assert len(pins) == 0


def test_every_policy_chooses_among_the_candidates_and_has_its_own_way():
    chosen = {}
    for name in ("cost", "affinity", "round_robin", "random", "least_tokens"):
        router, choose = Router(), policies.policy_of(name)
        if name == "cost":
            knows(router, Home("a", 0), 4)
        found = []
        for _ in range(6):
            reservation = router.reserve(homes("a", "b", "c"), prompt(4, session=b"s"), policy=choose, now_s=0.0)
            assert reservation is not None
            router.sent(reservation, now_s=0.0)
            found.append(reservation.home.worker)
        chosen[name] = "".join(found)
    assert chosen["cost"][0] == "a"
    assert len(set(chosen["affinity"])) == 1
    assert chosen["round_robin"] == "abcabc"
    assert len(set(chosen["random"])) > 1
    assert chosen["least_tokens"] == "abcabc"
