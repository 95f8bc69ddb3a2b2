"""The block pool against a model that keeps every block's state in a plain dictionary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonshard.kv.blocks import BlockGroup, BlockGroups, BlockMisuse, BlockPool, PartitionCounts


def test_allocation_is_all_or_nothing():
    pool = BlockPool(1, 4, 16)
    assert pool.allocate(0, 3) == (0, 1, 2)
    assert pool.allocate(0, 2) is None
    assert pool.counts(0) == PartitionCounts(free=1, used=3, leased=0, quarantined=0)
    assert pool.allocate(0, 0) == ()


def test_the_least_recently_freed_block_is_reused_first():
    pool = BlockPool(1, 4, 16)
    pool.allocate(0, 4)
    for block in (2, 0, 3, 1):
        pool.release(0, [block])
    assert pool.allocate(0, 4) == (2, 0, 3, 1)


def test_a_shared_block_is_free_only_after_its_last_release():
    pool = BlockPool(1, 2, 16)
    blocks = pool.allocate(0, 2) or ()
    pool.retain(0, blocks[:1])
    pool.release(0, blocks)
    assert pool.num_free(0) == 1
    pool.release(0, blocks[:1])
    assert pool.num_free(0) == 2


def test_partitions_do_not_share_blocks():
    pool = BlockPool(2, 2, 16)
    assert pool.allocate(0, 2) == pool.allocate(1, 2) == (0, 1)
    pool.release(1, [0])
    assert (pool.num_free(0), pool.num_free(1)) == (0, 1)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (300, 19)])
def test_a_started_block_counts_whole(num_tokens: int, num_blocks: int):
    assert BlockPool(1, 1, 16).num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("misused", [[2], [0, 3], [0, 4], [-1], [1, 1]], ids=str)
@pytest.mark.parametrize("verb", ["release", "retain"])
def test_misuse_raises_and_changes_nothing(verb: str, misused: list[int]):
    pool = BlockPool(1, 4, 16)
    pool.allocate(0, 2)
    before = pool.counts(0), [pool.num_refs(0, block) for block in range(4)]
    with pytest.raises(BlockMisuse):
        getattr(pool, verb)(0, misused)
    assert (pool.counts(0), [pool.num_refs(0, block) for block in range(4)]) == before


def test_a_leased_block_is_neither_released_nor_restored():
    pool = BlockPool(1, 2, 16)
    leased = pool.lease(0, 1) or ()
    for verb in (pool.release, pool.retain, pool.restore):
        with pytest.raises(BlockMisuse):
            verb(0, leased)
    pool.quarantine(0, leased)
    with pytest.raises(BlockMisuse):
        pool.land(0, leased)


class Pools(RuleBasedStateMachine):
    """`refs` maps used blocks to their count; `leased` and `quarantined` are sets of (partition, block)."""

    @initialize(num_partitions=st.sampled_from([1, 4]), num_blocks=st.integers(1, 6))
    def start(self, num_partitions: int, num_blocks: int):
        self.pool = BlockPool(num_partitions, num_blocks, 16)
        self.num_blocks = num_blocks
        self.refs: dict[tuple[int, int], int] = {}
        self.leased: set[tuple[int, int]] = set()
        self.quarantined: set[tuple[int, int]] = set()

    def free(self, partition: int) -> int:
        held = [*self.refs, *self.leased, *self.quarantined]
        return self.num_blocks - sum(owner == partition for owner, _ in held)

    @rule(data=st.data(), num=st.integers(0, 4), is_lease=st.booleans())
    def take(self, data: st.DataObject, num: int, is_lease: bool):
        partition = data.draw(st.integers(0, self.pool.num_partitions - 1))
        blocks = (self.pool.lease if is_lease else self.pool.allocate)(partition, num)
        assert (blocks is None) == (num > self.free(partition))
        keys = {(partition, block) for block in blocks or ()}
        assert len(keys) == (num if blocks is not None else 0)
        assert not keys & {*self.refs, *self.leased, *self.quarantined}
        if is_lease:
            self.leased |= keys
        else:
            self.refs |= dict.fromkeys(keys, 1)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), is_retain=st.booleans())
    def count(self, data: st.DataObject, is_retain: bool):
        key = data.draw(st.sampled_from(sorted(self.refs)))
        (self.pool.retain if is_retain else self.pool.release)(key[0], [key[1]])
        self.refs[key] += 1 if is_retain else -1
        if self.refs[key] == 0:
            del self.refs[key]

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), is_landed=st.booleans())
    def end_lease(self, data: st.DataObject, is_landed: bool):
        key = data.draw(st.sampled_from(sorted(self.leased)))
        self.leased.remove(key)
        (self.pool.land if is_landed else self.pool.quarantine)(key[0], [key[1]])
        if is_landed:
            self.refs[key] = 1
        else:
            self.quarantined.add(key)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def restore(self, data: st.DataObject):
        key = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.quarantined.remove(key)
        self.pool.restore(key[0], [key[1]])

    @invariant()
    def blocks_are_conserved(self):
        for partition in range(self.pool.num_partitions):
            counts = self.pool.counts(partition)
            assert counts.total == self.num_blocks
            assert counts.free == self.pool.num_free(partition) == self.free(partition)
            assert counts.used == sum(owner == partition for owner, _ in self.refs)
            assert counts.leased == sum(owner == partition for owner, _ in self.leased)
            for block in range(self.num_blocks):
                assert self.pool.num_refs(partition, block) == self.refs.get((partition, block), 0)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- groups

GROUPS = st.lists(
    st.one_of(
        st.just(BlockGroup()), st.builds(BlockGroup.sliding, st.integers(2, 20), st.integers(1, 12), st.integers(1, 5))
    ),
    min_size=1,
    max_size=3,
)


def in_the_order_of_taking(groups: list[BlockGroup], num_columns: int) -> list[tuple[int, int]]:
    """(group, column) of each block, as a sequence takes them that grows column by column."""
    order = list[tuple[int, int]]()
    for column in range(num_columns):
        order += ((i, column) for i, group in enumerate(groups) if column < (group.max_blocks or num_columns))
    return order


@given(groups=GROUPS, num_columns=st.integers(0, 30))
def test_blocks_stand_in_the_order_in_which_columns_take_them(groups: list[BlockGroup], num_columns: int):
    found, order = BlockGroups(tuple(groups)), in_the_order_of_taking(groups, num_columns)
    assert found.num_blocks(num_columns) == len(order)
    for i, group in enumerate(groups):
        for column in range(num_columns):
            own = column if group.max_blocks is None else column % group.max_blocks
            assert found.place(i, column) == order.index((i, own))


@given(groups=GROUPS, num_blocks=st.integers(0, 60))
def test_as_many_columns_fit_as_their_blocks_do(groups: list[BlockGroup], num_blocks: int):
    found = BlockGroups(tuple(groups))
    num_columns = found.num_columns(num_blocks)
    if num_columns is None:
        assert all(group.max_blocks is not None for group in groups)
        assert found.num_blocks(1000) <= num_blocks
    else:
        assert found.num_blocks(num_columns) <= num_blocks < found.num_blocks(num_columns + 1)


@given(window=st.integers(2, 40), step=st.integers(1, 20), size=st.integers(1, 9), start=st.integers(0, 200))
def test_a_step_writes_over_nothing_that_it_or_a_later_one_sees(window: int, step: int, size: int, start: int):
    group = BlockGroup.sliding(window, step, size)
    columns = {position // size for position in range(max(0, start - window + 1), start + step)}
    assert group.max_blocks is not None
    assert len({column % group.max_blocks for column in columns}) == len(columns)


@given(window=st.integers(2, 40), step=st.integers(1, 20), size=st.integers(1, 9))
def test_a_bound_is_no_larger_than_some_step_needs(window: int, step: int, size: int):
    starts = range(window, window + size)
    needed = max(len({position // size for position in range(start - window + 1, start + step)}) for start in starts)
    assert BlockGroup.sliding(window, step, size).max_blocks == needed


@given(groups=GROUPS, num_tokens=st.integers(1, 60), size=st.integers(1, 5))
def test_of_a_prompt_the_blocks_are_told_that_the_next_position_sees(
    groups: list[BlockGroup], num_tokens: int, size: int
):
    found = BlockGroups(tuple(groups))
    seen = set[tuple[int, int]]()
    for i, group in enumerate(groups):
        first = 0 if group.window is None else max(0, num_tokens - group.window + 1)
        seen |= {(position // size, found.place(i, position // size)) for position in range(first, num_tokens)}
    told = found.seen(num_tokens, size)
    assert set(told) == seen
    assert len(told) == len(seen) == BlockPool(1, 1, size, found).num_seen(num_tokens)
    assert [block.column for block in told] == sorted(block.column for block in told)


def test_one_group_without_a_window_has_its_columns_as_places():
    assert BlockGroups().seen(20, 8) == ((0, 0), (1, 1), (2, 2))
    assert BlockPool(1, 4, 8).num_tokens_in(3, 100) == 24


@given(groups=GROUPS, num_columns=st.integers(1, 30))
def test_what_a_pool_says_of_lengths_is_what_its_groups_say(groups: list[BlockGroup], num_columns: int):
    pool = BlockPool(1, 120, 4, BlockGroups(tuple(groups)))
    num_blocks = pool.num_blocks_for(4 * num_columns)
    assert num_blocks == pool.num_blocks_for(4 * num_columns - 3) == pool.groups.num_blocks(num_columns)
    assert pool.num_tokens_in(num_blocks, 4 * num_columns) == 4 * num_columns
    assert pool.num_blocks_to_grow(num_blocks) == pool.groups.num_blocks(num_columns + 1) - num_blocks


@given(groups=GROUPS, num_columns=st.integers(0, 30))
def test_only_blocks_that_are_never_written_over_are_shared(groups: list[BlockGroup], num_columns: int):
    found = BlockGroups(tuple(groups))
    places = {
        found.place(index, column)
        for index, group in enumerate(groups)
        for column in range(num_columns)
        if group.window is None
    }
    assert set(found.places_to_share(num_columns)) == places
    later = {found.place(i, c) for i in range(len(groups)) for c in range(num_columns, num_columns + 40)}
    assert not places & later


@given(groups=GROUPS, num_tokens=st.integers(1, 60), size=st.integers(1, 5))
def test_another_choice_copies_what_it_sees_and_may_not_share(groups: list[BlockGroup], num_tokens: int, size: int):
    found = BlockGroups(tuple(groups))
    shared = set(found.places_to_share(num_tokens // size))
    seen = [block.place for block in found.seen(num_tokens, size)]
    assert list(found.places_to_copy(num_tokens, size)) == [place for place in seen if place not in shared]


def test_a_window_that_sees_nothing_before_it_is_refused():
    with pytest.raises(ValueError, match="a window of 1 tokens"):
        BlockGroup.sliding(1, 8, 4)
