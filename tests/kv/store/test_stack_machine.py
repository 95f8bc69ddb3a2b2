"""Several tiers at once, whatever happens to each: no block ever has other bytes than were kept by its name.

Tiers are so small that what one lookup found is given up by another's blocks before it is fetched. One of them loses
blocks by itself, as memory that others share does; files rot; what they hold comes back after a restart.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonshard.kv.prefix import BlockName
from moonshard.kv.store.host import HostTier
from moonshard.kv.store.stack import Fetched, TierStack
from tests.kv.store.kept_tier import KeptTier
from tests.kv.store.ssd.blocks_on_disk import BLOCK_BYTES, IN_MEMORY, blocks, chain, open_tier, rot

CHAINS = [chain(number, 6) for number in range(4)]
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 6)
NAMES = [name for names in CHAINS for name in names]


class Tiers(RuleBasedStateMachine):
    @initialize(num_host=st.integers(1, 5), num_files=st.integers(1, 9))
    def begin(self, num_host: int, num_files: int):
        self.num_host, self.num_files = num_host, num_files
        self.path = Path(tempfile.mkdtemp(dir=IN_MEMORY)) / "store"
        self.shared = KeptTier(block_bytes=BLOCK_BYTES)
        self.ever_kept = set[BlockName]()
        self.found: tuple[list[BlockName], list[str]] | None = None
        self.fetched: Fetched | None = None
        self.open()

    def open(self) -> None:
        self.host = HostTier(block_bytes=BLOCK_BYTES, max_bytes=self.num_host * BLOCK_BYTES)
        self.files = open_tier(self.path, self.num_files)
        self.stack = TierStack([self.host, self.shared, self.files])

    @rule(names=chains, length=lengths, start=st.integers(0, 5))
    def keep(self, names: list[BlockName], length: int, start: int):
        kept = names[start:length]
        if kept:
            self.ever_kept.update(kept)
            told = self.stack.keep([(names[start - 1] if start else None, kept, blocks(kept))])
            assert told["store"] == kept  # which has room for all
            assert all(set(own) <= set(kept) for own in told.values())

    @rule(names=chains, length=lengths)
    def look(self, names: list[BlockName], length: int):
        """What is fetched later, whatever comes in between."""
        tiers = self.stack.find(names[:length])
        for name, tier in zip(names, tiers, strict=False):
            assert (tier is None) or name in self.ever_kept
            assert tier is not None or name not in self.shared.kept
        num_found = next((index for index, tier in enumerate(tiers) if tier is None), length)
        self.found = (names[:num_found], [tier for tier in tiers[:num_found] if tier is not None])

    @precondition(lambda self: self.found is not None)
    @rule()
    def fetch(self):
        assert self.found is not None
        names, tiers = self.found
        self.fetched = self.stack.fetch(names, tiers)
        assert self.fetched.names == tuple(names[: len(self.fetched.names)])
        assert np.array_equal(self.fetched.blocks, blocks(self.fetched.names))
        assert sum(run.num_blocks for run in self.fetched.runs) == len(self.fetched.names)
        certain = self.shared.kept.keys() - self.shared.broken
        is_certain = [tier != "ssd" and name in certain for name, tier in zip(names, tiers, strict=True)]
        assert len(self.fetched.names) >= [*is_certain, False].index(False)

    @precondition(lambda self: self.fetched is not None and self.fetched.names)
    @rule()
    def promote(self):
        assert self.fetched is not None
        self.stack.promote(self.fetched)

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: BlockName):
        """The shared memory gives up a block."""
        self.shared.kept.pop(name, None)

    @rule(name=st.sampled_from(NAMES))
    def break_one(self, name: BlockName):
        """It says that it has the block, and does not give it."""
        self.shared.broken ^= {name}

    @rule(which=st.integers(0, 8), offset=st.integers(0, BLOCK_BYTES - 1))
    def rot(self, which: int, offset: int):
        held = sorted(self.files.held())
        if held:
            self.files.flush()
            rot(self.path, held[which % len(held)], offset)

    @rule()
    def restart(self):
        """Of the process: what is in files and in shared memory is still there."""
        before = set(self.files.held())
        self.stack.close()
        self.open()
        assert set(self.files.held()) == before
        self.found = self.fetched = None

    @rule()
    def keep_up(self):
        self.stack.upkeep()

    @invariant()
    def tiers_hold_no_more_than_they_may(self):
        if hasattr(self, "stack"):
            assert (self.host.counters.bytes_held or 0) <= self.num_host * BLOCK_BYTES
            assert (self.files.counters.bytes_held or 0) <= self.num_files * BLOCK_BYTES

    def teardown(self):
        if hasattr(self, "stack"):
            self.stack.close()
            shutil.rmtree(self.path.parent)


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
