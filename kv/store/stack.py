"""Several tiers as one: the nearest that has a block gives it, and all of them keep it.

Every method blocks and belongs on a thread. Which blocks are worth fetching is `serving.control.tiers`' to say.
"""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.tier import Tier, TierCounters


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedRun:
    """What one tier gave."""

    tier: str
    num_asked: int
    num_blocks: int  # of the first that were asked for, up to the first that did not come
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The first blocks that were asked for, up to the first that did not come."""

    names: tuple[BlockName, ...]
    blocks: Bytes  # [len(names), block_bytes]
    runs: tuple[FetchedRun, ...]


class TierStack:
    """Nearest first. All have blocks of the same bytes. Of no tiers nothing is found."""

    def __init__(self, tiers: Sequence[Tier]):
        if len({tier.block_bytes for tier in tiers}) > 1:
            raise ValueError("tiers of a stack have blocks of one size")
        self._tiers = tuple(tiers)
        self._by_name = {tier.name: tier for tier in tiers}
        self.block_bytes = tiers[0].block_bytes if tiers else 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def is_shared(self, tier: str) -> bool:
        """Whether every worker finds in that tier what any has kept."""
        return self._by_name[tier].is_shared

    @property
    def counters(self) -> Mapping[str, TierCounters]:
        return {tier.name: tier.counters for tier in self._tiers}

    def find(self, chain: Sequence[BlockName]) -> list[str | None]:
        """The nearest tier that has each block of a chain, as far as is known without reading it."""
        found: list[str | None] = [None] * len(chain)
        for tier in self._tiers:
            start = next((index for index, name in enumerate(found) if name is None), len(chain))
            if start == len(chain):
                break
            for index, is_here in enumerate(tier.find(chain[start:]), start):
                if is_here and found[index] is None:
                    found[index] = tier.name
        return found

    def lacking(self, chains: Iterable[Sequence[BlockName]], only: str | None = None) -> set[BlockName]:
        """Those that some tier, or the `only` one, is not known to have."""
        return {
            name
            for chain in chains
            for tier in self._those(only)
            for name, is_here in zip(chain, tier.has(chain), strict=True)
            if not is_here
        }

    def renew(self, chain: Sequence[BlockName]) -> dict[str, list[BlockName]]:
        """Those that each tier is known to lack, and no tier behind it has for all who would find them there. Where a
        tier knows of use, the others count as used now.

        A near tier that is too small for all that is used would else be written to without end: what is fetched from
        behind it, `promote` gives it.
        """
        found = {tier.name: tier.has(chain) for tier in self._tiers}
        lost = {tier.name: [is_here is False for is_here in found[tier.name]] for tier in self._tiers}
        for tier, behind in itertools.combinations(self._tiers, 2):
            if behind.is_shared or not tier.is_shared:
                both = zip(lost[tier.name], found[behind.name], strict=True)
                lost[tier.name] = [is_lost and not is_behind for is_lost, is_behind in both]
        return {tier: list(itertools.compress(chain, is_lost)) for tier, is_lost in lost.items()}

    def fetch(self, chain: Sequence[BlockName], tiers: Sequence[str]) -> Fetched:
        """Reads each block of a chain from the tier that is named for it, until one does not come: neither from there,
        nor from a tier behind that, where it had lost the block since it was looked for.
        """
        blocks = np.empty((len(chain), self.block_bytes), np.uint8)
        runs = list[FetchedRun]()
        num_good = 0
        for start, end in _runs(tiers):
            behind = self._tiers[self.names.index(tiers[start]) :]
            for tier in behind:
                if num_good < end:
                    runs.append(self._fetch_from(tier, chain[num_good:end], blocks[num_good:end]))
                    num_good += runs[-1].num_blocks
            if num_good < end:
                break
        return Fetched(names=tuple(chain[:num_good]), blocks=blocks[:num_good], runs=tuple(runs))

    def _fetch_from(self, tier: Tier, chain: Sequence[BlockName], out: Bytes) -> FetchedRun:
        began_s = time.perf_counter()
        came = tier.fetch(chain, out)
        num_came = next((index for index, is_good in enumerate(came) if not is_good), len(came))
        seconds = time.perf_counter() - began_s
        return FetchedRun(tier=tier.name, num_asked=len(chain), num_blocks=num_came, seconds=seconds)

    def keep(
        self, chains: Iterable[tuple[BlockName | None, Sequence[BlockName], Bytes]], only: str | None = None
    ) -> dict[str, list[BlockName]]:
        """Every tier, or the `only` one, keeps what it does not have, of chains with the block before each.

        The names that each has now.
        """
        tiers = self._those(only)
        found: dict[str, list[BlockName]] = {tier.name: [] for tier in tiers}
        for parent, names, blocks in chains:
            for tier in tiers:
                kept = tier.keep(names, blocks)
                if parent is not None:
                    tier.has((parent, *names))  # so that it knows what these are behind
                found[tier.name] += [name for name, is_kept in zip(names, kept, strict=True) if is_kept]
        return found

    def promote(self, fetched: Fetched) -> None:
        """The tiers before the one that gave a block keep it too."""
        start = 0
        for run in fetched.runs:
            end = start + run.num_blocks
            for tier in self._tiers[: self.names.index(run.tier)] if end > start else ():
                tier.keep(fetched.names[start:end], fetched.blocks[start:end])
            start = end

    def held(self) -> dict[str, list[BlockName]]:
        """What each tier has from the beginning."""
        return {tier.name: tier.held() for tier in self._tiers}

    def upkeep(self) -> None:
        """What has to be done now and then."""
        for tier in self._tiers:
            tier.upkeep()

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def _those(self, only: str | None) -> Sequence[Tier]:
        return self._tiers if only is None else (self._by_name[only],)


def _runs(tiers: Sequence[str]) -> list[tuple[int, int]]:
    """Where each run of one and the same tier begins and ends."""
    starts = [index for index, tier in enumerate(tiers) if not index or tiers[index - 1] != tier]
    return list(itertools.pairwise([*starts, len(tiers)]))
