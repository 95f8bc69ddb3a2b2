"""Tiers of names keep what the tiers of bytes do, and what their options say."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.experiments.replay.tiers import (
    FETCH_MS,
    RETENTION,
    NamesTier,
    RetentionName,
    TierConfig,
    new_tier,
    tier_of,
)
from moonshard.kv.prefix import block_names
from moonshard.kv.store.host import HostTier
from moonshard.kv.store.ssd.extents import no_headers
from moonshard.kv.store.ssd.space import Space
from moonshard.kv.store.tier import Tier

NUM_BLOCKS = 6

policies = pytest.mark.parametrize("retention", RETENTION)
chains = st.sampled_from(
    [
        block_names(b"", [number % 2] * 2 + [number + 10] * 6, 1)[start:end]
        for number in range(4)
        for start, end in ((0, 1), (0, 4), (0, 8), (2, 5), (4, 8))
    ]
)
calls = st.lists(st.tuples(st.sampled_from(["keep", "keep", "find", "fetch"]), chains), max_size=40)


def names_tier(name: str, retention: RetentionName) -> NamesTier:
    return new_tier(tier_of(f"{name}:{NUM_BLOCKS}", retention))


def no_bytes(names: list[bytes]) -> np.ndarray:
    return np.empty((len(names), 0), np.uint8)


class SpaceOfOneByte:
    """What the tier in files does with its space."""

    def __init__(self, retention: RetentionName):
        self._space = Space(no_headers(NUM_BLOCKS), block_bytes=1, num_touched=0, policy=RETENTION[retention]())

    def find(self, names: list[bytes]) -> list[bool]:
        self._space.link(names)
        return [name in self._space for name in names]

    def fetch(self, names: list[bytes], _out: object) -> list[bool]:
        self._space.touch(names)
        return [name in self._space for name in names]

    def keep(self, names: list[bytes], _blocks: object) -> list[bool]:
        pending = self._space.reserve(names).pending
        if pending:
            self._space.fill_headers(pending, [0] * len(pending))
            self._space.commit(pending)
        return [name in self._space for name in names]


def same_answers(tier: NamesTier, real: HostTier | SpaceOfOneByte, calls: list[tuple[str, list[bytes]]]) -> None:
    for call, names in calls:
        rows = np.zeros((len(names), 1), np.uint8)
        if call == "find":
            assert tier.find(names) == real.find(names)
        elif call == "fetch":
            assert tier.fetch(names, no_bytes(names)) == real.fetch(names, rows)
        else:
            assert tier.keep(names, no_bytes(names)) == real.keep(names, rows)


@policies
@settings(max_examples=40)
@given(calls)
def test_host_keeps_what_the_tier_in_memory_does(retention: RetentionName, calls: list):
    tier = names_tier("host", retention)
    real = HostTier(block_bytes=1, max_bytes=NUM_BLOCKS, policy=RETENTION[retention]())
    same_answers(tier, real, calls)
    counters, expected = tier.counters, real.counters
    assert counters.num_hits == expected.num_hits
    assert counters.num_kept == expected.num_kept
    assert counters.num_evicted == expected.num_evicted


@policies
@settings(max_examples=40)
@given(calls)
def test_ssd_keeps_what_the_tier_in_files_does(retention: RetentionName, calls: list):
    tier = names_tier("ssd", retention)
    same_answers(tier, SpaceOfOneByte(retention), calls)
    every = sorted({name for _, names in calls for name in names})
    assert sum(tier.find(every)) == tier.counters.num_kept - tier.counters.num_evicted <= NUM_BLOCKS


@pytest.mark.parametrize("name", FETCH_MS)
def test_names_tiers_are_tiers(name: str):
    assert isinstance(names_tier(name, "lru"), Tier)
    assert names_tier(name, "lru").is_shared == (name == "store")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:7", TierConfig(name="host", num_blocks=7, block_ms=1.5, fixed_ms=0.2, retention="s3_fifo")),
        ("ssd:7:2.5", TierConfig(name="ssd", num_blocks=7, block_ms=2.5, fixed_ms=0.5, retention="s3_fifo")),
        ("store:7:2:0", TierConfig(name="store", num_blocks=7, block_ms=2.0, fixed_ms=0.0, retention="s3_fifo")),
        ("host:7:lru", TierConfig(name="host", num_blocks=7, block_ms=1.5, fixed_ms=0.2, retention="lru")),
        ("ssd:7:2:1:lru", TierConfig(name="ssd", num_blocks=7, block_ms=2.0, fixed_ms=1.0, retention="lru")),
    ],
)
def test_a_tier_is_what_its_option_says(text: str, expected: TierConfig):
    assert tier_of(text, "s3_fifo") == expected


def test_fetching_takes_its_fixed_time_and_that_of_each_block():
    assert tier_of("ssd:9:6:0.5").fetch_s(4) == pytest.approx(0.0245)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("disk:5", "'disk' is none of host, ssd, store"),
        ("host", "expected NAME:BLOCKS"),
        ("host:lru", "expected NAME:BLOCKS"),
        ("host:0", "'0' is no number of blocks"),
        ("host:-3", "'-3' is no number of blocks"),
        ("host:many", "'many' is no number of blocks"),
        ("host:5:fifo", "'fifo' is no number of milliseconds, and no policy of lru, s3_fifo, hit_density"),
        ("host:5:1:inf", "'inf' is no number of milliseconds"),
        ("host:5:nan", "'nan' is no number of milliseconds"),
        ("host:5:1:1:1", "expected NAME:BLOCKS"),
    ],
)
def test_an_option_that_is_no_tier_is_refused(text: str, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        tier_of(text)
