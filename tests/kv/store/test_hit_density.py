"""Hit density lets go of what brute force does, of chains the ends, and learns what comes back."""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.kv.prefix import block_names
from moonshard.kv.store import hit_density
from moonshard.kv.store.hit_density import HitDensity
from moonshard.kv.store.lifetimes import NUM_CLASSES
from moonshard.kv.store.retention import Lru, Policy, Retained
from tests.kv.store.least_dense import LeastDense

LEARN_EVERY = 10  # so that something is learnt within a test


@pytest.fixture(autouse=True)
def _learns_soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hit_density, "LEARN_EVERY", LEARN_EVERY)


def chain(number: int, length: int, common: int = 2) -> list[bytes]:
    """Chains of one parity have their first `common` blocks in common."""
    return block_names(b"", ([number % 2] * common + [number + 10] * 20)[:length], 1)


parts = st.sampled_from([chain(number, end)[start:] for number in range(6) for end in (1, 3, 5, 8) for start in (0, 2)])
parts = parts.filter(bool)
moves = st.lists(st.tuples(st.sampled_from(["keep", "touch", "touch", "link", "evict"]), parts), max_size=120)


def play(policy: Policy, moves: list[tuple[str, list[bytes]]], also: LeastDense | None = None) -> set[bytes]:
    """What is here at the end. Where `also` is given, both must let go of the same."""
    both = [policy] if also is None else [policy, also]
    here = set[bytes]()
    for move, names in moves:
        parents = dict(zip(names[1:], names, strict=False))
        for name in names if move == "keep" else ():
            if name not in here:
                here.add(name)
                for each in both:
                    each.insert(name, parents.get(name))
                    if isinstance(each, LeastDense):
                        each.learn()
        for each in both if move in ("touch", "link", "keep") else ():
            (each.touch if move == "touch" else each.link)(names)
        if move == "evict" and here:
            lost = {each.evict() for each in both}
            assert len(lost) == 1
            here -= lost
        if also is not None:
            also.learn()
    return here


def with_parents(names: list[bytes]) -> list[tuple[bytes | None, bytes]]:
    return list(zip((None, *names), names, strict=False))


def drain(policy: Policy) -> list[bytes]:
    return list(iter(policy.evict, None))


@settings(max_examples=60)
@given(moves)
def test_it_lets_go_of_what_brute_force_does(moves: list):
    policy, oracle = HitDensity(), LeastDense(LEARN_EVERY)
    here = play(policy, moves, oracle)
    assert set(policy.order()) == here == oracle.blocks.keys()
    assert drain(policy) == [oracle.evict() for _ in here]


@settings(max_examples=60)
@given(moves)
def test_a_block_is_never_lost_before_those_behind_it(moves: list):
    policy = HitDensity()
    here = play(policy, moves)
    parents = {name: kept.parent for name in here if (kept := policy.retained(name)) is not None}
    assert parents.keys() == here
    for lost in drain(policy):
        del parents[lost]
        assert lost not in parents.values()
    assert not parents


@settings(max_examples=60)
@given(moves, st.randoms(use_true_random=False))
def test_what_is_restored_is_what_was_stored_in_whatever_order(moves: list, shuffler):
    policy, restored = HitDensity(), HitDensity()
    kept = [(name, retained) for name in sorted(play(policy, moves)) if (retained := policy.retained(name)) is not None]
    shuffler.shuffle(kept)
    restored.restore(kept)
    assert {name: restored.retained(name) for name, _ in kept} == dict(kept)
    assert all(0 <= retained.usage < 256 for _, retained in kept)
    parents = {name: retained.parent for name, retained in kept}
    for lost in drain(restored):
        del parents[lost]
        assert lost not in parents.values()
    assert not parents


def test_what_was_used_lately_outlives_what_was_not_across_a_restart():
    policy, restored = HitDensity(), HitDensity()
    for number in range(8):
        policy.insert(chain(number, 1, common=0)[0], None)
    used = [chain(number, 1, common=0)[0] for number in (1, 4, 6)]
    policy.touch(used)
    for name in [chain(number, 1, common=0)[0] for number in range(10, 100)]:  # time goes by
        policy.insert(name, None)
        policy.remove(name)
    policy.touch(used)
    kept = [(name, retained) for name in policy.order() if (retained := policy.retained(name)) is not None]
    restored.restore(kept)
    assert set(drain(restored)[-3:]) == set(used)


def test_a_block_that_is_removed_is_neither_here_nor_evicted():
    policy, names = HitDensity(), chain(0, 4)
    play(policy, [("keep", names)])
    policy.remove(names[1])
    assert policy.retained(names[1]) is None
    assert policy.order().count(names[1]) == 0
    lost = drain(policy)
    assert sorted(lost) == sorted(set(names) - {names[1]})
    assert lost.index(names[3]) < lost.index(names[2])


def test_names_in_a_circle_are_let_go_of():
    policy, names = HitDensity(), [bytes([number]) * 16 for number in range(3)]
    for name in names:
        policy.insert(name, None)
    policy.link([*names, names[0], names[0]])
    policy.touch([names[0]])
    restored = HitDensity()
    restored.restore([(name, Retained(names[number - 1], 0)) for number, name in enumerate(names)])
    assert sorted(drain(policy)) == sorted(drain(restored)) == names


def test_one_chain_is_lost_and_not_a_little_of_each():
    policy, first, second = HitDensity(), chain(0, 6, common=0), chain(1, 6, common=0)
    play(policy, [("keep", first), ("keep", second), ("touch", first), ("touch", second)])
    restored = HitDensity()
    restored.restore([(name, Retained(parent, 0)) for names in (first, second) for parent, name in with_parents(names)])
    assert [policy.evict() for _ in range(6)] == [restored.evict() for _ in range(6)] == first[::-1]


class Store:
    """Keeps chains, as many blocks as it has room for."""

    def __init__(self, policy: Policy, max_blocks: int):
        self._policy, self._max_blocks = policy, max_blocks
        self._here = OrderedDict[bytes, None]()

    def see(self, names: Sequence[bytes]) -> int:
        """How many of these were here. They are now."""
        num_found = sum(name in self._here for name in names)
        self._policy.touch(names)
        for index, name in enumerate(names):
            if name not in self._here:
                self._policy.insert(name, names[index - 1] if index else None)
                self._here[name] = None
        while len(self._here) > self._max_blocks:
            del self._here[self._policy.evict() or b""]
        return num_found


def rounds(store: Store, returning: Sequence[Sequence[bytes]], numbers: range) -> list[int]:
    """Each round all of these come back, with ten chains of six blocks in between that nobody sees again."""
    found = list[int]()
    for number in numbers:
        found.append(sum(store.see(names) for names in returning))
        for once in range(10):
            store.see(block_names(f"{number} {once}".encode(), range(6), 1))
    return found


@pytest.mark.parametrize(("new_policy", "expected"), [(HitDensity, 20), (Lru, 0)])
def test_what_comes_back_is_kept_while_more_than_fits_is_seen_once(new_policy: Callable[[], Policy], expected: int):
    returning = [chain(number, 10, common=0) for number in range(2)]
    found = rounds(Store(new_policy(), 50), returning, range(20))
    assert set(found[-5:]) == {expected}


def test_a_shift_of_what_comes_back_is_learnt():
    store = Store(HitDensity(), 50)
    rounds(store, [chain(number, 10, common=0) for number in range(2)], range(15))
    found = rounds(store, [chain(number, 10, common=0) for number in (2, 3)], range(15, 40))
    assert set(found[-5:]) == {20}


def test_what_is_used_all_the_time_costs_no_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hit_density, "LEARN_EVERY", 1 << 20)
    policy, names = HitDensity(), chain(0, 6)
    play(policy, [("keep", names)])
    policy.touch(names)
    before = len(pickle.dumps(policy))
    for _ in range(1000):
        policy.touch(names)
        policy.touch(names[:3])
    assert len(pickle.dumps(policy)) < before + 5_000


def test_what_was_lost_is_remembered_for_as_many_blocks_as_there_are():
    policy, names = HitDensity(), [bytes([number]) * 16 for number in range(100)]
    for name in names:
        policy.insert(name, None)
    lost = [policy.evict() or b"" for _ in range(60)]
    for name in lost:
        policy.insert(name, None)
    came_back = [name for name in lost if (kept := policy.retained(name)) and kept.usage % NUM_CLASSES == 1]
    assert came_back == lost[-40:]
