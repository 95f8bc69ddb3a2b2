"""Several tiers answer as one: the nearest gives, all keep, and what fails ends what is used."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.prefix import block_names
from moonshard.kv.store.host import HostTier
from moonshard.kv.store.stack import TierStack
from moonshard.kv.store.tier import Tier

BLOCK_BYTES, SIZE = 8, 4
NAMES = block_names(b"root", range(6 * SIZE), SIZE)
numbers = st.integers(0, len(NAMES))


class NamedHost(HostTier):
    def __init__(self, name: str, num_kept: int = 0):
        super().__init__(block_bytes=BLOCK_BYTES, max_bytes=100 * BLOCK_BYTES)
        self.name = name
        self.keep(NAMES[:num_kept], filled(NAMES[:num_kept], name))


def filled(names: Sequence[bytes], by: str) -> np.ndarray:
    return np.full((len(names), BLOCK_BYTES), ord(by[0]), np.uint8)


@given(st.tuples(numbers, numbers, numbers))
def test_each_block_comes_from_the_nearest_tier_that_has_it(num_kept: tuple[int, int, int]):
    tiers = [NamedHost(name, num) for name, num in zip("abc", num_kept, strict=True)]
    stack = TierStack(tiers)
    expected = [
        next((tier.name for tier, num in zip(tiers, num_kept, strict=True) if index < num), None)
        for index in range(len(NAMES))
    ]
    assert stack.find(NAMES) == expected
    asked = [name for name in expected if name is not None]
    fetched = stack.fetch(NAMES[: len(asked)], asked)
    assert fetched.names == tuple(NAMES[: len(asked)])
    assert [chr(row[0]) for row in fetched.blocks] == asked
    assert sum(run.num_blocks for run in fetched.runs) == len(asked)
    assert [run.tier for run in fetched.runs] == sorted(set(asked))


def test_a_block_that_does_not_come_ends_what_is_fetched():
    near, far = NamedHost("a", 2), NamedHost("b", 3)
    fetched = TierStack([near, far]).fetch(NAMES[:5], ["a", "a", "b", "b", "a"])
    assert fetched.names == tuple(NAMES[:3])
    assert [(run.tier, run.num_asked, run.num_blocks) for run in fetched.runs] == [("a", 2, 2), ("b", 2, 1)]


def test_what_a_tier_lost_since_it_was_looked_for_comes_from_one_behind_it():
    near, middle, far = NamedHost("a", 1), NamedHost("b", 2), NamedHost("c", 4)
    fetched = TierStack([near, middle, far]).fetch(NAMES[:5], ["a", "a", "a", "c", "c"])
    assert fetched.names == tuple(NAMES[:4])
    assert [chr(row[0]) for row in fetched.blocks] == list("abcc")
    told = [(run.tier, run.num_asked, run.num_blocks) for run in fetched.runs]
    assert told == [("a", 3, 1), ("b", 2, 1), ("c", 1, 1), ("c", 2, 1)]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.booleans(), min_size=6, max_size=6)), min_size=1, max_size=4))
def test_what_is_lost_is_what_no_tier_behind_has_for_the_same_readers(drawn: list[tuple[bool, list[bool]]]):
    tiers = list[NamedHost]()
    for letter, (is_shared, has) in zip("abcd", drawn, strict=False):
        tier = NamedHost(letter)
        tier.is_shared = is_shared
        for name, is_here in zip(NAMES, has, strict=True):
            if is_here:
                tier.keep([name], filled([name], letter))
        tiers.append(tier)
    for number, (name, found) in enumerate(TierStack(tiers).renew(NAMES).items()):
        assert name == tiers[number].name
        is_shared, has = drawn[number]
        behind = [there for behind_is_shared, there in drawn[number + 1 :] if behind_is_shared or not is_shared]
        expected = [not here and not any(there[i] for there in behind) for i, here in enumerate(has)]
        assert found == [block for block, is_lost in zip(NAMES, expected, strict=True) if is_lost]


def test_what_came_from_afar_is_near_afterwards():
    near, far = NamedHost("a"), NamedHost("b", 3)
    stack = TierStack([near, far])
    stack.promote(stack.fetch(NAMES[:3], ["b"] * 3))
    assert stack.find(NAMES[:3]) == ["a"] * 3
    out = np.zeros((3, BLOCK_BYTES), np.uint8)
    near.fetch(NAMES[:3], out)
    assert np.array_equal(out, filled(NAMES[:3], "b"))


def test_all_tiers_keep_and_what_some_lacks_is_known():
    near, far = NamedHost("a", 1), NamedHost("b", 2)
    stack = TierStack([near, far])
    assert stack.lacking([NAMES[:2], NAMES[2:3]]) == set(NAMES[1:3])
    kept = stack.keep([(None, NAMES[:2], filled(NAMES[:2], "x")), (NAMES[1], NAMES[2:4], filled(NAMES[2:4], "x"))])
    assert kept == {"a": list(NAMES[:4]), "b": list(NAMES[:4])}
    assert stack.lacking([NAMES[:4]]) == set()


def test_tiers_of_other_blocks_are_no_stack():
    other: Tier = HostTier(block_bytes=2 * BLOCK_BYTES, max_bytes=100)
    with pytest.raises(ValueError, match="one size"):
        TierStack([NamedHost("a"), other])
