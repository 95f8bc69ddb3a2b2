"""What one tier lacks of the blocks that the device has: tried again as long as the device has them.

One block that lacks makes all behind it in its chain useless. A piece is tried first, and then the rest at once, or
after twice the pause another piece. Tiers have one each, so that one that is off for good delays no other.
"""

import itertools
from collections.abc import Collection

from moonshard.kv.prefix import BlockName
from moonshard.serving.control.tiers.piece import Piece

AGAIN_S = 6.0  # after a failure: a tier that failed is left alone for somewhat less
MAX_AGAIN_S = 60.0


class Aside:
    """Of the tier of this name. At most so many blocks are remembered. Seconds of any one clock."""

    def __init__(self, tier: str, max_blocks: int):
        self._tier = tier
        self._max_blocks = max_blocks
        self._parents = dict[tuple[int, BlockName], BlockName | None]()  # the oldest first
        self._again_at_s = float("inf")
        self._pause_s = AGAIN_S
        self._has_failed = False  # when it was last written to

    def __len__(self) -> int:
        return len(self._parents)

    def is_due(self, now_s: float) -> bool:
        return bool(self._parents) and now_s >= self._again_at_s

    def forget(self, partition: int, name: BlockName) -> None:
        """The device has lost it, or never had it."""
        self._parents.pop((partition, name), None)

    def take(self, max_blocks: int) -> Piece:
        """The oldest, of one partition. Not to be called where there are none."""
        partition = next(iter(self._parents))[0]
        keys = itertools.islice((key for key in self._parents if key[0] == partition), max_blocks)
        taken = {name: self._parents[partition, name] for _, name in keys}
        for name in taken:
            del self._parents[partition, name]
        return Piece(partition=partition, names=tuple(taken), parents=tuple(taken.values()), again_for=self._tier)

    def wrote(self, piece: Piece, kept: Collection[BlockName], now_s: float) -> None:
        """What of a piece the tier has now; the rest is set aside. Where it has all, what else was is soon tried."""
        lacking = piece.without(kept)
        self._has_failed = bool(lacking.names)
        if not self._has_failed:
            self._pause_s = AGAIN_S
            self._again_at_s = min(self._again_at_s, now_s + AGAIN_S)
            return
        self._again_at_s = now_s + self._pause_s
        if piece.again_for is not None:
            self._pause_s = min(2 * self._pause_s, MAX_AGAIN_S)
        self._add(lacking)

    def found_lacking(self, piece: Piece, now_s: float) -> None:
        """The tier has lost these: they are tried now, unless it keeps nothing anyway."""
        self._add(piece)
        if not self._has_failed:
            self._again_at_s = now_s

    def _add(self, piece: Piece) -> None:
        for name, parent in zip(piece.names, piece.parents, strict=True):
            if len(self._parents) < self._max_blocks:
                self._parents[piece.partition, name] = parent
