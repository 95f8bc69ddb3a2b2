"""The router counts tokens and not requests, prefers workers that cached a prompt, and releases everything once."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.routing import policies
from moonshard.serving.control.routing.pins import Pins
from moonshard.serving.control.routing.router import Ask, Home, Reservation, Router

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
    """A prompt of blocks named p0, p1, ..."""
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


@given(
    schedule=st.lists(
        st.tuples(
            st.integers(1, 40_000),
            st.sampled_from(["send", "see", "release", "report", "silence", "nothing"]),
            st.integers(0, 5),
            st.sampled_from(["cost", "affinity", "least_tokens"]),
        ),
        max_size=60,
    )
)
def test_tokens_in_flight_are_those_of_the_open_reservations_and_none_in_the_end(
    schedule: list[tuple[int, str, int, policies.PolicyName]],
):
    router, held = Router(), list[Reservation]()
    for now_s, (num_tokens, then, which, policy) in enumerate(schedule):
        key = None if which == 5 else bytes([which])
        ask = Ask(num_tokens=num_tokens, num_prompt=num_tokens, affinity_key=key)
        found = router.reserve(HOMES, ask, policy=policies.policy_of(policy), now_s=now_s)
        assert found is not None
        held.append(found)
        one = held[which % len(held)]
        if then == "send":
            router.sent(one, now_s)
        elif then == "see":
            router.seen(one)
        elif then == "release":
            router.release(one)
            held.remove(one)
        elif then == "report":
            router.report(one.home, num_tokens)
        elif then == "silence":
            router.silent(one.home)
        for home in HOMES:
            assert router.in_flight_tokens(home) == sum(r.num_tokens for r in held if r.home == home)
    for reservation in held:
        router.release(reservation)
    for home in HOMES:
        assert router.in_flight_tokens(home) == 0
        router.report(home, 7)
        assert router.queued_tokens(home) == 7  # nothing is thought to be unseen
    assert not router._unsent
    assert not router._coming


def test_two_routers_that_hear_the_same_reports_share_the_load():
    first, second = Router(), Router()
    for router in (first, second):
        router.report(Home("a", 0), 1000)
        router.report(Home("b", 0), 0)
    assert take(first, homes("a", "b"), 100).home == take(second, homes("a", "b"), 100).home == Home("b", 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 1000), st.booleans()), min_size=1, max_size=40))
def test_routers_agree_whenever_workers_have_reported_what_all_of_them_sent(sends: list[tuple[int, int, bool]]):
    """Until then each knows more of its own requests than the others do, and of nobody's less."""
    routers, unseen, truth = [Router() for _ in range(3)], list[tuple[Router, Reservation]](), Counter[Home]()
    for router in routers:
        for home in HOMES:
            router.report(home, 0)
    for which, num_tokens, is_reported in sends:
        sent = take(routers[which], HOMES, num_tokens)
        unseen.append((routers[which], sent))
        truth[sent.home] += num_tokens
        assert all(router.queued_tokens(home) <= truth[home] for router in routers for home in HOMES)
        if is_reported:
            for router, reservation in unseen:
                router.seen(reservation)
            unseen.clear()
            for router in routers:
                for home in HOMES:
                    router.report(home, truth[home])
            assert [[router.queued_tokens(home) for home in HOMES] for router in routers] == [
                [truth[home] for home in HOMES]
            ] * len(routers)


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
        router.sent(reservation, now_s=0.1 * number)
        router.release(reservation)
    assert max(chosen.values()) <= 1.2 * 60 / 3


def test_conversations_are_shared_out_by_their_number_and_not_by_what_they_have_computed_so_far():
    """One home is far behind in tokens. Still it does not get all new conversations until it is not."""
    router, chosen = Router(), Counter[str]()
    for place, worker in enumerate("ab"):
        turn(router, homes(worker), f"old {place}", num_blocks=400)
    for number in range(9):
        chosen[turn(router, homes("a", "b", "c"), f"new {number}", num_blocks=2)] += 1
    assert chosen["c"] < 9
    assert min(chosen[worker] for worker in "ab") >= 1
    later = [turn(router, homes("a", "b", "c"), f"new {number}", num_blocks=3) for number in range(9)]
    assert Counter(later) == chosen  # each where it was


def test_a_conversation_that_goes_to_and_fro_counts_once():
    router = Router()
    turn(router, homes("c"), "another", num_blocks=20)
    for number in range(20):
        turn(router, homes("ab"[number % 2]), "one", num_blocks=1 + number)  # which computes as much in each of them
    assert turn(router, homes("c", "b", "a"), "new", num_blocks=2) == "a"


def test_a_lone_conversation_stays_with_its_cache_whatever_the_others_do_not():
    """Nobody else has anything to do: its home has all of the conversations, and all of what was computed lately."""
    for num_blocks, num_more in ((312, 32), (20, 10), (3, 1)):
        router, everywhere = Router(), homes(*"abcdefgh")
        first = turn(router, everywhere, "one", num_blocks=num_blocks)
        assert turn(router, everywhere, "one", num_blocks=num_blocks + num_more) == first


def test_first_prompts_that_are_alike_are_shared_out_as_the_conversations_that_they_are():
    router, chosen = Router(), Counter[str]()
    for _ in range(12):
        chosen[turn(router, homes("a", "b", "c"), "system prompt", num_blocks=2, num_more=60)] += 1
    assert max(chosen.values()) <= 6


def test_a_prompt_that_came_before_is_found_again_where_nobody_has_anything_to_do():
    router, everywhere = Router(), homes("a", "b", "c")
    first = turn(router, everywhere, "the same", num_blocks=8, num_more=33)
    assert [turn(router, everywhere, "the same", num_blocks=8, num_more=33) for _ in range(2)] == [first, first]


def turn(router: Router, among: list[Home], conversation: str, *, num_blocks: int, num_more: int = 0) -> str:
    """Sends the session's next prompt, which begins with the one before: the worker that it goes to, and caches it."""
    own = names(*(f"{conversation} {index}" for index in range(num_blocks)))
    num_tokens = num_blocks * BLOCK + num_more  # the last of them fill no block
    ask = Ask(num_tokens=num_tokens, num_prompt=num_tokens, is_prefill=True, names=own)
    reservation = router.reserve(among, ask, policy=policies.cost, now_s=1.0)
    assert reservation is not None
    router.sent(reservation, now_s=1.0)
    router.release(reservation)
    for name in own:
        router.index.add(router.home_number(reservation.home), name)
    return reservation.home.worker


def test_what_a_home_was_given_long_ago_counts_no_more():
    router, ask = Router(), prompt(4)
    knows(router, Home("a", 0), 1)
    for _ in range(100):
        reservation = router.reserve(homes("a"), ask, policy=policies.cost, now_s=0.0)
        assert reservation is not None
        router.sent(reservation, now_s=0.0)
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
        reservation = router.reserve(among, prompt(4, affinity_key=key), policy=policies.cost, now_s=1.0)
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
        reservation = router.reserve(among, prompt(4, affinity_key=b"session"), policy=policies.cost, now_s=1.0)
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


def test_what_was_decided_and_never_sent_was_given_to_nobody():
    plain, router, ask = Router(), Router(), prompt(4)
    for one in (plain, router):
        for home in homes("a", "b"):
            one.report(home, 0)
        knows(one, Home("a", 0), 1)
    for number in range(100):
        reservation = router.reserve(homes("a"), ask, policy=policies.cost, now_s=0.5 * number)
        assert reservation is not None
        router.release(reservation)
    found = [one.reserve(homes("a", "b"), ask, policy=policies.cost, now_s=50.0) for one in (plain, router)]
    assert [reservation and reservation.home.worker for reservation in found] == ["a", "a"]


def test_a_conversation_that_was_decided_and_never_sent_is_nobodys():
    plain, router = Router(), Router()
    for one in (plain, router):
        knows(one, Home("a", 0), 1)
    for number in range(100):
        own = names("p0", f"{number}")
        ask = Ask(num_tokens=2 * BLOCK, num_prompt=2 * BLOCK, is_prefill=True, names=own)
        reservation = router.reserve(homes("a"), ask, policy=policies.cost, now_s=1.0)
        assert reservation is not None
        router.release(reservation)
    found = [one.reserve(homes("a", "b"), prompt(4), policy=policies.cost, now_s=1.0) for one in (plain, router)]
    assert [reservation and reservation.home.worker for reservation in found] == ["a", "a"]


@dataclass(frozen=True)
class _Kept:
    """The last turn of a conversation."""

    affinity_key: bytes | None
    names: tuple[bytes, ...]
    worker: str


def _go_on(kept: list[_Kept], turn: _Kept) -> None:
    if turn.affinity_key is not None:
        kept[:] = [one for one in kept if one.affinity_key != turn.affinity_key]
    else:
        before = [one for one in kept if one.affinity_key is None and one.names == turn.names[: len(one.names)]]
        before = [one for one in before if len(one.names) < len(turn.names)]
        if before:
            kept.remove(max(reversed(before), key=lambda one: len(one.names)))
    if turn.affinity_key is not None or turn.names:
        kept.append(turn)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from("ab"), st.booleans(), st.booleans()),
        max_size=40,
    )
)
def test_a_home_has_the_conversations_whose_last_turns_were_sent_to_it(asks: list[tuple[int, int, str, bool, bool]]):
    """Against a list of turns, all at one time: what is given up unsent changes nothing."""
    router = Router()
    kept: list[_Kept] = []
    for conversation, num_blocks, worker, has_session, is_sent in asks:
        own = names(*(f"{conversation} {index}" for index in range(num_blocks)))
        key = f"session {conversation}".encode() if has_session else None
        ask = Ask(num_tokens=BLOCK, num_prompt=BLOCK, is_prefill=True, names=own, affinity_key=key)
        reservation = router.reserve(homes(worker), ask, now_s=1.0)
        assert reservation is not None
        if not is_sent:
            router.release(reservation)
            continue
        router.sent(reservation, now_s=1.0)
        _go_on(kept, _Kept(key, tuple(own), worker))
    expected = Counter(one.worker for one in kept)
    loads = router._loads.conversations
    assert {worker: round(loads[router.home_number(Home(worker, 0))], 6) for worker in "ab"} == {
        worker: expected[worker] for worker in "ab"
    }


def test_what_is_given_up_after_its_conversation_went_on_takes_nothing_with_it():
    router, own = Router(), names("0", "1", "2")
    asks = [Ask(num_tokens=BLOCK, num_prompt=BLOCK, is_prefill=True, names=own[:length]) for length in (1, 2, 3)]
    first, second, third = (router.reserve(homes(worker), ask) for worker, ask in zip("abc", asks, strict=True))
    assert first is not None
    assert second is not None
    assert third is not None
    router.sent(first, now_s=0.0)
    router.sent(third, now_s=0.0)
    for reservation in (second, first, third):
        router.release(reservation)
    assert [router._loads.conversations[router.home_number(home)] for home in homes("a", "b", "c")] == [0, 0, 1]


def test_how_long_a_completion_might_get_is_no_work_that_was_given_lately():
    router, everywhere = Router(), homes("a", "b")
    for home in everywhere:
        router.report(home, 0)
    for turn in range(1, 20):
        own = names(*(f"p{i}" for i in range(20 + turn)))
        ask = Ask(num_tokens=200_000, num_prompt=(20 + turn) * BLOCK, names=own)
        reservation = router.reserve(everywhere, ask, policy=policies.cost, now_s=float(turn))
        assert reservation is not None
        router.sent(reservation, now_s=float(turn))
        router.release(reservation)
        knows(router, reservation.home, 20 + turn)
        assert reservation.num_known_tokens == (0 if turn == 1 else (19 + turn) * BLOCK)


def test_a_session_that_comes_twice_at_once_stays_together():
    router, everywhere = Router(pins=Pins()), homes("a", "b", "c")
    asks = [prompt(1, affinity_key=b"session")] * 2 + [prompt(1, affinity_key=b"another")]
    found = [router.reserve(everywhere, ask, policy=policies.affinity, now_s=1.0) for ask in asks]
    first, second, other = found
    assert first is not None
    assert second is not None
    assert other is not None
    assert (second.home, second.affinity, other.affinity) == (first.home, "hit", "miss")
    for reservation in (second, first):  # neither was sent
        router.release(reservation)
    again = router.reserve(everywhere, asks[0], policy=policies.affinity, now_s=1.0)
    assert again is not None
    assert again.affinity == "miss"


def test_without_a_session_nothing_is_pinned():
    router = Router(pins=(pins := Pins()))
    reservation = take(router, HOMES)
    router.sent(reservation, now_s=0.0)
    assert reservation.affinity is None
    assert pins.num_pins == 0


def test_every_policy_chooses_among_the_candidates_and_has_its_own_way():
    chosen = {}
    for name in ("cost", "affinity", "round_robin", "random", "least_tokens"):
        router, choose = Router(), policies.policy_of(name)
        if name == "cost":
            knows(router, Home("a", 0), 4)
        found = []
        for _ in range(6):
            reservation = router.reserve(homes("a", "b", "c"), prompt(4, affinity_key=b"s"), policy=choose, now_s=0.0)
            assert reservation is not None
            router.sent(reservation, now_s=0.0)
            found.append(reservation.home.worker)
        chosen[name] = "".join(found)
    assert chosen["cost"][0] == "a"
    assert len(set(chosen["affinity"])) == 1
    assert chosen["round_robin"] == "abcabc"
    assert len(set(chosen["random"])) > 1
    assert chosen["least_tokens"] == "abcabc"
