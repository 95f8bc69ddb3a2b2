"""The index against brute force, and what is heard in whatever order against what was said."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.routing.prefix_index import PrefixChange, PrefixIndex, PrefixSubscriber

NUM_HOMES = 4


def chain(text: str) -> list[bytes]:
    """Each name stands for all letters so far."""
    return [text[: end + 1].encode() for end in range(len(text))]


texts = st.text("ab", max_size=6)
known = st.lists(st.tuples(st.integers(0, NUM_HOMES - 1), texts), max_size=12)


def an_index(facts: Sequence[tuple[int, str]]) -> PrefixIndex:
    index = PrefixIndex()
    for home, text in facts:
        for name in chain(text):
            index.add(home, name)
    return index


def by_hand(facts: Sequence[tuple[int, str]], text: str) -> dict[int, int]:
    found = {}
    for home in range(NUM_HOMES):
        names = {name for owner, own in facts if owner == home for name in chain(own)}
        length = next((i for i, name in enumerate(chain(text)) if name not in names), len(text))
        if length:
            found[home] = length
    return found


@given(facts=known, text=texts)
def test_every_home_is_told_with_the_length_it_knows(facts: list[tuple[int, str]], text: str):
    assert an_index(facts).num_known(chain(text)) == by_hand(facts, text)


@given(facts=known, gone=st.integers(0, NUM_HOMES - 1), text=texts)
def test_a_purged_home_knows_nothing_and_the_others_what_they_knew(facts: list[tuple[int, str]], gone: int, text: str):
    index = an_index(facts)
    index.purge(gone)
    rest = [(home, own) for home, own in facts if home != gone]
    assert index.num_known(chain(text)) == by_hand(rest, text)
    assert len(index) == len({name for _, own in rest for name in chain(own)})
    assert index.known(gone) == frozenset()


@given(facts=known, home=st.integers(0, NUM_HOMES - 1), text=texts)
def test_the_end_of_a_chain_is_forgotten_alone(facts: list[tuple[int, str]], home: int, text: str):
    index = an_index([*facts, (home, text)])
    leaves = [own for owner, own in facts if owner == home and own.startswith(text)]
    if not text or leaves:
        return
    index.remove(home, text.encode())
    index.remove(home, text.encode())  # twice is once
    assert index.num_known(chain(text)).get(home, 0) == len(text) - 1


@given(names=st.sets(st.sampled_from(chain("abab"))))
def test_ends_whose_beginning_is_forgotten_count_for_nothing(names: set[bytes]):
    index = PrefixIndex()
    for name in names:
        index.add(0, name)
    asked = chain("abab")
    assert index.num_known(asked).get(0, 0) in range(by_hand_of(names, asked) + 1)
    if names == set(asked):
        assert index.num_known(asked) == {0: len(asked)}


def test_whoever_has_lost_a_beginning_is_not_said_to_know_it_nor_hides_who_does():
    asked = chain("abab")
    parts = [set(part) for length in range(5) for part in itertools.combinations(asked, length)]
    for known in itertools.product(parts, repeat=2):
        index = PrefixIndex()
        for home, names in enumerate(known):
            for name in names:
                index.add(home, name)
        found, by_hand = index.num_known(asked), [by_hand_of(names, asked) for names in known]
        assert all(found.get(home, 0) <= num for home, num in enumerate(by_hand)), known
        if known[0] | known[1] == set(asked):
            assert found == {home: num for home, num in enumerate(by_hand) if num}, known


def by_hand_of(names: set[bytes], asked: Sequence[bytes]) -> int:
    return next((i for i, name in enumerate(asked) if name not in names), len(asked))


def said(*changes: tuple[str, bool]) -> list[PrefixChange]:
    return [PrefixChange(0, name.encode(), is_known) for name, is_known in changes]


EVENTS = said(("a", True), ("b", True), ("a", False), ("c", True), ("a", True), ("b", False))
AFTER = {b"c", b"a"}


def hearing() -> PrefixSubscriber:
    return PrefixSubscriber(PrefixIndex(), homes=(0,))


@given(cuts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_events_that_come_twice_change_nothing_and_a_gap_asks_for_a_snapshot(cuts: list[tuple[int, int]]):
    heard, num_heard, has_gap = hearing(), 0, False
    for first, length in cuts:
        is_complete = heard.events(1, first, EVENTS[first : first + length])
        has_gap |= first > num_heard
        assert is_complete == (not has_gap)
        if not has_gap:
            num_heard = max(num_heard, min(first + length, len(EVENTS)))
    expected: set[bytes] = set()
    for one in EVENTS[:num_heard]:
        (expected.add if one.is_known else expected.discard)(one.name)
    if not has_gap:
        assert heard.index.known(0) == expected


def test_a_snapshot_mends_a_gap_and_events_go_on_behind_it():
    heard = hearing()
    assert not heard.events(1, 3, EVENTS[3:4])
    heard.snapshot(1, 4, [(0, b"b"), (0, b"c")])
    assert heard.events(1, 2, EVENTS[2:])  # the first two of these are in the snapshot
    assert heard.index.known(0) == AFTER


def test_a_snapshot_older_than_what_was_heard_is_ignored():
    heard = hearing()
    heard.events(1, 0, EVENTS)
    heard.snapshot(1, 2, [(0, b"a"), (0, b"b")])
    assert heard.index.known(0) == AFTER


def test_a_snapshot_in_parts_counts_once_it_is_whole_and_no_part_without_the_one_before_it():
    heard = hearing()
    heard.snapshot(1, 4, [(0, b"a")], goes_on=True)
    heard.snapshot(1, 4, [(0, b"b")], has_more=True)
    heard.snapshot(1, 5, [(0, b"of another one")], goes_on=True)
    assert not heard.events(1, 4, said(("early", True)))
    heard.snapshot(1, 4, [(0, b"c")], goes_on=True)
    assert heard.index.known(0) == {b"b", b"c"}
    assert heard.events(1, 4, said(("z", True)))
    heard.snapshot(1, 9, [(0, b"d")], has_more=True)
    heard.gone()
    heard.snapshot(1, 9, [(0, b"e")], goes_on=True)
    assert heard.index.known(0) == set()


def test_another_process_begins_anew_and_the_former_one_is_not_listened_to_for_long():
    heard = hearing()
    heard.events(1, 0, EVENTS)
    assert heard.events(2, 0, said(("z", True)))
    assert heard.index.known(0) == {b"z"}
    assert not heard.events(3, 5, said(("y", True)))
    assert heard.index.known(0) == frozenset()


def test_who_is_gone_is_forgotten():
    heard = hearing()
    heard.events(1, 0, EVENTS)
    heard.gone()
    assert len(heard.index) == 0
