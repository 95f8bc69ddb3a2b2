"""Blocks that are read from the device in one go, to be written to slower tiers."""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace

from moonshard.kv.prefix import BlockName


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Blocks of one partition that were completed one after another."""

    partition: int
    names: tuple[BlockName, ...]
    parents: tuple[BlockName | None, ...]  # of each the block before it, where that is known
    again_for: str | None = None  # the one tier that is known to lack them; None: they are new to all

    def only(self, names: Collection[BlockName]) -> "Piece":
        """What it has of these."""
        return self._where([name in names for name in self.names])

    def without(self, names: Collection[BlockName]) -> "Piece":
        """What it has besides these."""
        return self._where([name not in names for name in self.names])

    def chains(self) -> list[slice]:
        """Where those stand in it that are each behind the one before: blocks of several sequences come mixed."""
        starts = [
            index
            for index, parent in enumerate(self.parents)
            if not index or parent is None or parent != self.names[index - 1]
        ]
        return [slice(*ends) for ends in itertools.pairwise([*starts, len(self.names)])]

    def _where(self, is_kept: list[bool]) -> "Piece":
        names = tuple(itertools.compress(self.names, is_kept))
        return replace(self, names=names, parents=tuple(itertools.compress(self.parents, is_kept)))
