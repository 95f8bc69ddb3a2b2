"""Policies let go of what their papers say, of chains the ends, and still do when they are restored."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.prefix import block_names
from moonshard.kv.store.retention import Lru, Policy, Retained, S3Fifo
from tests.kv.store.oldest_first import OldestFirst

POLICIES = (Lru, S3Fifo)
both = pytest.mark.parametrize("new_policy", POLICIES)


def chain(number: int, length: int, common: int = 2) -> list[bytes]:
    """Chains of one parity have their first `common` blocks in common."""
    tokens = [number % 2] * common + [number + 10] * 20
    return block_names(b"", tokens[:length], 1)


parts = st.sampled_from(
    [
        chain(number, end)[start:]
        for number in range(6)
        for end in range(1, 8)
        for start in (0, 0, 1, 2, 3)
        if start < end
    ]
)
moves = st.lists(st.tuples(st.sampled_from(["keep", "touch", "link", "evict"]), parts), max_size=60)


def insert(policy: Policy | OldestFirst, names: list[bytes], here: set[bytes]) -> None:
    parents = dict(zip(names[1:], names, strict=False))
    for name in [name for name in reversed(names) if name not in here]:
        policy.insert(name, parents.get(name))
        here.add(name)


def play(policy: Policy, moves: list[tuple[str, list[bytes]]]) -> set[bytes]:
    """What is here at the end."""
    here = set[bytes]()
    for move, names in moves:
        if move == "keep":
            insert(policy, names, here)
            policy.link(names)
        elif move == "touch":
            policy.touch(names)
        elif move == "link":
            policy.link(names)
        else:
            lost = policy.evict()
            assert (lost is None) == (not here)
            here.discard(lost or b"")
    return here


def drain(policy: Policy) -> list[bytes]:
    return list(iter(policy.evict, None))


@given(moves)
def test_lru_lets_go_of_what_was_used_longest_ago(moves: list):
    policy, oracle, here = Lru(), OldestFirst(), set[bytes]()
    for move, names in moves:
        if move == "keep":
            insert(policy, names, set(here))
            insert(oracle, names, here)
        if move == "touch":
            policy.touch(names)
            oracle.use(names)
        elif move in ("keep", "link"):
            policy.link(names)
            oracle.learn(names)
        elif here:
            is_end = {name: oracle.ends_chain(name) for name in here}
            lost = oracle.evict()
            assert policy.evict() == lost
            assert is_end[lost]
            here.remove(lost)
    assert policy.order() == sorted(oracle.used_at, key=oracle.used_at.__getitem__)


@both
@given(moves)
def test_a_block_is_never_lost_before_those_behind_it(new_policy: Callable[[], Policy], moves: list):
    policy = new_policy()
    here = play(policy, moves)
    parents = {name: kept.parent for name in here if (kept := policy.retained(name)) is not None}
    assert parents.keys() == here
    for lost in drain(policy):
        del parents[lost]
        assert lost not in parents.values()
    assert not parents


@both
@given(moves)
def test_a_restored_policy_lets_go_in_the_same_order(new_policy: Callable[[], Policy], moves: list):
    policy, restored = new_policy(), new_policy()
    here = play(policy, moves)
    kept = [(name, policy.retained(name)) for name in policy.order()]
    assert {name for name, _ in kept} == here
    assert len(kept) == len(here)
    assert all(retained is not None and 0 <= retained.usage < 256 for _, retained in kept)
    restored.restore((name, retained) for name, retained in kept if retained is not None)
    assert drain(restored) == drain(policy)


@both
@given(moves, st.randoms(use_true_random=False))
def test_chains_are_lost_from_their_ends_whatever_order_is_restored(
    new_policy: Callable[[], Policy], moves: list, shuffler
):
    policy, restored = new_policy(), new_policy()
    here = play(policy, moves)
    kept = [(name, retained) for name in sorted(here) if (retained := policy.retained(name)) is not None]
    shuffler.shuffle(kept)
    restored.restore(kept)
    parents = {name: retained.parent for name, retained in kept}
    for lost in drain(restored):
        del parents[lost]
        assert lost not in parents.values()
    assert not parents


@both
def test_a_chain_that_is_not_used_goes_before_what_is_newer(new_policy: Callable[[], Policy]):
    policy, names, newer = new_policy(), chain(0, 3), [chain(number, 3)[2] for number in (1, 2, 3)]
    insert(policy, names, set())
    for name in newer:
        policy.insert(name, None)
    assert drain(policy) == [*names[::-1], *newer]


@both
def test_a_block_that_is_removed_is_neither_here_nor_evicted(new_policy: Callable[[], Policy]):
    policy, names = new_policy(), chain(0, 4)
    insert(policy, names, set())
    policy.remove(names[1])
    assert policy.retained(names[1]) is None
    assert policy.order().count(names[1]) == 0
    lost = drain(policy)
    assert sorted(lost) == sorted(set(names) - {names[1]})
    assert lost.index(names[3]) < lost.index(names[2])


@both
def test_a_block_that_comes_back_is_before_its_own_again(new_policy: Callable[[], Policy]):
    policy, names = new_policy(), chain(0, 4)
    insert(policy, names, set())
    policy.remove(names[1])
    policy.insert(names[1], names[0])
    assert drain(policy) == names[::-1]


@both
def test_names_in_a_circle_are_let_go_of(new_policy: Callable[[], Policy]):
    policy, names = new_policy(), [bytes([number]) * 16 for number in range(3)]
    for name in names:
        policy.insert(name, None)
    policy.link([*names, names[0], names[0]])
    policy.touch([names[0]])
    restored = new_policy()
    restored.restore([(name, Retained(names[number - 1], 0)) for number, name in enumerate(names)])
    assert sorted(drain(policy)) == sorted(drain(restored)) == names


class PaperS3Fifo:
    """Algorithm 1 of the paper, in lists of (name, frequency), the newest first; but it inserts, then makes room."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.small, self.main, self.ghosts = [], [], []

    def read(self, name: bytes) -> None:
        for entry in self.small + self.main:
            if entry[0] == name:
                entry[1] = min(entry[1] + 1, 3)
                return
        if name in self.ghosts:
            self.ghosts.remove(name)
            self.main.insert(0, [name, 0])
        else:
            self.small.insert(0, [name, 0])
        while len(self.small) + len(self.main) > self.capacity:
            self.evict()

    def evict(self) -> None:
        if not self.main or len(self.small) > max(1, (len(self.small) + len(self.main)) // 10):
            self.evict_small()
        else:
            self.evict_main()

    def evict_small(self) -> None:
        name, frequency = self.small.pop()
        if frequency > 1:
            self.main.insert(0, [name, 0])
        else:
            self.ghosts = [name, *self.ghosts][: self.capacity]

    def evict_main(self) -> None:
        name, frequency = self.main.pop()
        if frequency > 0:
            self.main.insert(0, [name, frequency - 1])
        else:
            self.ghosts = [name, *self.ghosts][: self.capacity]

    @property
    def here(self) -> set[bytes]:
        return {name for name, _ in self.small + self.main}


@given(st.integers(1, 12), st.lists(st.integers(0, 20) | st.integers(0, 3), min_size=20, max_size=200))
def test_s3_fifo_is_that_of_the_paper(capacity: int, reads: list[int]):
    policy, paper, here = S3Fifo(), PaperS3Fifo(capacity), set[bytes]()
    for number in reads:
        name = bytes([number]) * 16
        if name in here:
            policy.touch([name])
        else:
            policy.insert(name, None)
            here.add(name)
        while len(here) > capacity:
            lost = policy.evict()
            assert lost is not None
            here.remove(lost)
        paper.read(name)
        assert here == paper.here


def test_s3_fifo_keeps_what_is_used_while_many_are_seen_once():
    policy, here = S3Fifo(), OrderedDict[bytes, None]()
    used = chain(0, 10)

    def see(names: list[bytes]) -> None:
        insert(policy, names, set(here))
        here.update(dict.fromkeys(names))
        while len(here) > 40:
            here.pop(policy.evict() or b"")

    see(used)
    policy.touch(used)
    policy.touch(used)
    for number in range(100):
        see(block_names(bytes([number]), range(5), 1))
    assert set(used) <= here.keys()
