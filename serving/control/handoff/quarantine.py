"""Slab cells that a transfer given up may still touch, and when they may be used again.

Shared by both sides: D's cells may still be written, P's may still be read. They come back as soon as the writer says
that nothing of the handoff is under way, and otherwise `quarantine_s` after they were given up. Nothing fences a remote
write, so that time proves nothing: safety rests on checking a private copy, and quarantine only spares needless
mismatches.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moonshard.kv.blocks import BlockPool


@dataclass(kw_only=True, slots=True)
class _Held:
    handoff: bytes
    writer_epoch: int
    partition: int
    cells: tuple[int, ...]
    until_s: float


type OnRestore = Callable[[int, tuple[int, ...]], None]  # the partition and its cells


def keep(partition: int, cells: tuple[int, ...]) -> None:
    """An `on_restore` that does nothing, for cells whose content does not matter."""
    del partition, cells


class Quarantine:
    """`on_restore` is told which cells are about to come back, while nobody else has them."""

    def __init__(self, slab: BlockPool, quarantine_s: float, on_restore: OnRestore = keep):
        self._on_restore = on_restore
        self._slab = slab
        self._quarantine_s = quarantine_s
        self._held: list[_Held] = []

    def holds(self, handoff: bytes) -> bool:
        return any(held.handoff == handoff for held in self._held)

    def add(self, handoff: bytes, writer_epoch: int, partition: int, cells: tuple[int, ...], now_s: float) -> None:
        """Cells go in quarantine. `cells` are leased."""
        if cells:
            self._slab.quarantine(partition, cells)
            until_s = now_s + self._quarantine_s
            self._held.append(
                _Held(handoff=handoff, writer_epoch=writer_epoch, partition=partition, cells=cells, until_s=until_s)
            )

    def drained(self, handoff: bytes, writer_epoch: int) -> None:
        """The writer itself says that nothing is under way. Another process at its address cannot say so."""
        self._restore([h for h in self._held if h.handoff == handoff and h.writer_epoch == writer_epoch])

    def expire(self, now_s: float) -> None:
        self._restore([held for held in self._held if held.until_s <= now_s])

    def _restore(self, ended: list[_Held]) -> None:
        for held in ended:
            self._held.remove(held)
            self._on_restore(held.partition, held.cells)
            self._slab.restore(held.partition, held.cells)
