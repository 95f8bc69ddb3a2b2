"""The prefix cache against a model that keeps what every block holds: no name ever leads to other content."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonshard.kv.blocks import BlockMisuse, BlockPool
from moonshard.kv.prefix import NAME_BYTES, PrefixCache, PrefixEvent, block_names, root_name

SIZE = 4
ROOT = root_name(b"model", b"float32", b"")


def test_a_name_is_the_length_prefixed_hash_of_parent_and_tokens():
    first = hashlib.sha256()
    for part in (ROOT, np.arange(SIZE, dtype="<i4").tobytes()):
        first.update(len(part).to_bytes(8, "little") + part)
    assert block_names(ROOT, range(SIZE), SIZE) == [first.digest()[:NAME_BYTES]]


@given(tokens=st.lists(st.integers(0, 3), max_size=30), cut=st.integers(0, 7))
def test_names_go_on_from_any_block_and_only_full_blocks_have_one(tokens: list[int], cut: int):
    names = block_names(ROOT, tokens, SIZE)
    assert len(names) == len(tokens) // SIZE
    known = min(cut, len(names))
    parent = names[known - 1] if known else ROOT
    assert names[:known] + block_names(parent, tokens[known * SIZE :], SIZE) == names


@given(
    a=st.lists(st.integers(0, 1), min_size=SIZE, max_size=20), b=st.lists(st.integers(0, 1), min_size=SIZE, max_size=20)
)
def test_names_are_equal_exactly_where_all_tokens_so_far_are(a: list[int], b: list[int]):
    pairs = zip(block_names(ROOT, a, SIZE), block_names(ROOT, b, SIZE), strict=False)
    for index, (one, other) in enumerate(pairs, start=1):
        assert (one == other) == (a[: index * SIZE] == b[: index * SIZE])


def test_roots_differ_by_every_part_and_by_where_one_ends():
    roots = [root_name(b"a", b"bc"), root_name(b"ab", b"c"), root_name(b"a", b"bc", b""), root_name(b"abc")]
    assert len(set(roots)) == len(roots)


def a_chain(num_blocks: int, seed: int = 0) -> list[bytes]:
    return block_names(ROOT, np.random.default_rng(seed).integers(0, 9, num_blocks * SIZE), SIZE)


def cached(pool: BlockPool, cache: PrefixCache, names: list[bytes]) -> tuple[int, ...]:
    blocks = pool.allocate(0, len(names)) or ()
    for block, name in zip(blocks, names, strict=True):
        cache.note(0, block, name)
    return blocks


def test_what_was_released_is_found_again_until_its_blocks_are_needed_the_end_of_a_chain_first():
    pool = BlockPool(1, 4, SIZE)
    cache, names = PrefixCache(pool), a_chain(3)
    blocks = cached(pool, cache, names)
    pool.release(0, blocks[::-1])
    assert cache.match(0, [*names, b"unknown"]) == blocks
    assert pool.allocate(0, 1) == (3,)  # the one that holds nothing
    for num_left in (2, 1, 0):
        assert pool.allocate(0, 1) == (blocks[num_left],)
        assert cache.match(0, names) == blocks[:num_left]


def test_who_is_held_again_is_used_last():
    pool = BlockPool(1, 2, SIZE)
    cache = PrefixCache(pool)
    (older,), (newer,) = cached(pool, cache, a_chain(1, 1)), cached(pool, cache, a_chain(1, 2))
    pool.release(0, [older])
    pool.release(0, [newer])
    cache.hold(0, [older])
    assert pool.num_refs(0, older) == 1
    pool.release(0, [older])
    assert pool.allocate(0, 2) == (newer, older)


def test_what_is_renewed_is_used_after_all_others_its_end_first():
    pool = BlockPool(1, 6, SIZE)
    cache, names = PrefixCache(pool), a_chain(3)
    blocks, (other, held) = cached(pool, cache, names), cached(pool, cache, a_chain(2, 1))
    for block in (*blocks, other):  # a chain from its beginning on
        pool.release(0, [block])
    cache.renew(0, [*names, *a_chain(2, 1)[1:], b"unknown"])
    assert pool.num_refs(0, held) == 1
    assert pool.allocate(0, 5) == (5, other, *blocks[::-1])


def test_a_second_block_of_the_same_content_stays_nameless():
    pool = BlockPool(1, 2, SIZE)
    cache, names = PrefixCache(pool), a_chain(1)
    (first,), (second,) = cached(pool, cache, names), cached(pool, cache, names)
    pool.release(0, [first, second])
    assert cache.match(0, names) == (first,)
    assert pool.allocate(0, 1) == (second,)


def test_a_chain_that_names_a_block_twice_is_matched_up_to_there():
    """No chain of hashes does, but names come over a wire; nobody holds a block twice for one sequence."""
    pool = BlockPool(1, 8, SIZE)
    cache, names = PrefixCache(pool), a_chain(3)
    blocks = cached(pool, cache, names)
    assert cache.match(0, [*names, names[1]]) == blocks
    assert cache.match(0, [names[0], names[0], names[1]]) == blocks[:1]


def test_only_kept_blocks_are_held_again():
    pool = BlockPool(1, 3, SIZE)
    cache = PrefixCache(pool)
    (known,) = cached(pool, cache, a_chain(1))
    (plain,) = pool.allocate(0, 1) or (-1,)
    for blocks in ([plain], [known, 2], [known, known], [3]):
        with pytest.raises(BlockMisuse):
            cache.hold(0, blocks)
        assert pool.num_refs(0, known) == 1


def test_events_say_what_a_snapshot_says_and_old_ones_are_not_made_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moonshard.kv.prefix.MAX_EVENTS", 3)
    pool = BlockPool(1, 2, SIZE)
    cache, names = PrefixCache(pool), a_chain(2)
    blocks = cached(pool, cache, names)
    events = cache.events_from(0) or ()
    assert [(event.number, event.name, event.is_known) for event in events] == [
        (0, names[0], True),
        (1, names[1], True),
    ]
    pool.release(0, blocks[::-1])
    pool.allocate(0, 2)
    assert cache.events_from(0) is None
    assert [(event.name, event.is_known) for event in cache.events_from(2) or ()] == [
        (names[1], False),
        (names[0], False),
    ]
    assert cache.events_from(4) == ()
    assert cache.snapshot(0) == ()


@given(num_events=st.integers(0, 12), max_events=st.integers(1, 12))
def test_events_from_any_number_are_all_that_came_since_or_none(num_events: int, max_events: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moonshard.kv.prefix.MAX_EVENTS", max_events)
        pool = BlockPool(1, 12, SIZE)
        cache, names = PrefixCache(pool), a_chain(num_events)
    cached(pool, cache, names)
    everything = [PrefixEvent(number, 0, name, is_known=True) for number, name in enumerate(names)]
    for number in range(num_events + 3):
        is_kept = number >= num_events - max_events
        assert cache.events_from(number) == (tuple(everything[number:]) if is_kept else None)


class Caches(RuleBasedStateMachine):
    """`content` is what each block really holds, as its writers know; sequences hold chains."""

    @initialize(num_partitions=st.sampled_from([1, 4]), num_blocks=st.integers(2, 8))
    def start(self, num_partitions: int, num_blocks: int):
        self.pool = BlockPool(num_partitions, num_blocks, SIZE)
        self.cache = PrefixCache(self.pool)
        self.num_blocks = num_blocks
        self.content: dict[tuple[int, int], bytes] = {}
        self.held: list[tuple[int, tuple[int, ...]]] = []
        self.leased: list[tuple[int, tuple[int, ...]]] = []
        self.heard: set[tuple[int, bytes]] = set()
        self.num_heard = 0

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=20), is_complete=st.booleans())
    def enter(self, data: st.DataObject, tokens: list[int], is_complete: bool):
        """A sequence takes what is known of it, computes the rest, and notes it, or ends before it could."""
        partition = data.draw(st.integers(0, self.pool.num_partitions - 1))
        names = block_names(ROOT, tokens, SIZE)
        found = self.cache.match(partition, names)
        assert [self.content[partition, block] for block in found] == names[: len(found)]
        self.cache.hold(partition, found)
        own = self.pool.allocate(partition, len(names) - len(found))
        if own is None:
            self.pool.release(partition, found[::-1])
            return
        for block, name in zip(own, names[len(found) :], strict=True):
            self.content[partition, block] = name if is_complete else b""
            if is_complete:
                self.cache.note(partition, block, name)
        self.held.append((partition, found + own))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject):
        index = data.draw(st.integers(0, len(self.held) - 1))
        partition, blocks = self.held.pop(index)
        self.pool.release(partition, blocks[::-1])

    @rule(data=st.data(), num=st.integers(1, 4))
    def lease(self, data: st.DataObject, num: int):
        """Leases blocks, as a transfer does that writes over whatever was there."""
        partition = data.draw(st.integers(0, self.pool.num_partitions - 1))
        blocks = self.pool.lease(partition, num)
        if blocks is not None:
            self.leased.append((partition, blocks))
            self.content |= dict.fromkeys(((partition, block) for block in blocks), b"")

    @precondition(lambda self: self.leased)
    @rule()
    def land(self):
        partition, blocks = self.leased.pop()
        self.pool.land(partition, blocks)
        self.held.append((partition, blocks))

    @invariant()
    def who_listens_knows_what_there_is(self):
        for event in self.cache.events_from(self.num_heard) or ():
            (self.heard.add if event.is_known else self.heard.remove)((event.partition, event.name))
        self.num_heard = self.cache.num_events
        partitions = range(self.pool.num_partitions)
        assert self.heard == {(partition, name) for partition in partitions for name in self.cache.snapshot(partition)}

    @invariant()
    def every_name_leads_to_its_content_and_no_block_is_lost(self):
        for partition in range(self.pool.num_partitions):
            for name in self.cache.snapshot(partition):
                (block,) = self.cache.match(partition, [name])
                assert self.content[partition, block] == name
            counts = self.pool.counts(partition)
            used = {block for owner, blocks in self.held for block in blocks if owner == partition}
            assert counts.used == len(used)
            assert counts.total == self.num_blocks
            assert self.pool.num_free(partition) == counts.free


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
