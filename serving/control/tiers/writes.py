"""Which KV blocks go down to slower tiers next: a bounded queue of what the prefix cache has learnt.

Blocks go down because they are complete, not because they are about to be lost: when room is needed it is too late to
read them. The queue holds names alone. A block that is lost before its turn is written by nobody; where the queue is
full the newest is not taken up, so that of a chain the beginning goes down, without which its end is of no use.

What some tier did not keep, as while it is switched off, is set aside and tried again as long as the device has it: one
block that lacks makes all behind it in its chain useless. A piece of it is tried first, and then the rest at once, or
after twice the pause another piece.
"""

import itertools
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from moonshard.kv.prefix import BlockName, PrefixEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Blocks of one partition that were completed one after another: what is read from the device in one go."""

    partition: int
    names: tuple[BlockName, ...]
    parents: tuple[BlockName | None, ...]  # of each the block before it, where that is known
    is_again: bool = False  # some tier did not keep it before

    def only(self, names: Container[BlockName]) -> "Piece":
        """What it has of these."""
        kept = [(name, parent) for name, parent in zip(self.names, self.parents, strict=True) if name in names]
        return replace(self, names=tuple(name for name, _ in kept), parents=tuple(parent for _, parent in kept))

    def chains(self) -> list[slice]:
        """Where those stand in it that are each behind the one before: blocks of several sequences come mixed."""
        starts = [
            index
            for index, parent in enumerate(self.parents)
            if not index or parent is None or parent != self.names[index - 1]
        ]
        return [slice(*ends) for ends in itertools.pairwise([*starts, len(self.names)])]


LONG_SHARE = 0.125  # of what a queue may hold
AGAIN_S = 6.0  # after a failure: a tier that failed is left alone for somewhat less
MAX_AGAIN_S = 60.0


class WriteQueue:
    """Told of all that the prefix cache learns and forgets, and of what came up from a tier and so is below already."""

    def __init__(self, max_blocks: int, num_partitions: int):
        self._max_blocks = max_blocks
        self._num_partitions = num_partitions
        self._queue = deque[PrefixEvent]()
        self._waiting = set[tuple[int, BlockName]]()
        self._aside = dict[tuple[int, BlockName], BlockName | None]()  # with the block before each, the oldest first
        self._again_at_s = float("inf")
        self._pause_s = AGAIN_S
        self.num_dropped = 0  # the queue was full
        self.num_lost = 0  # the pool reused them first

    def __repr__(self) -> str:
        aside = f"{len(self._aside)} aside"
        return f"WriteQueue({len(self)} wait, {aside}, {self.num_dropped} dropped, {self.num_lost} lost)"

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    @property
    def is_long(self) -> bool:
        """Whether it should be emptied faster than whoever has the device would like."""
        return len(self) > LONG_SHARE * self._max_blocks

    def note(self, events: Iterable[PrefixEvent], below: Container[BlockName] = ()) -> None:
        """Takes up what became known; `below` need not go down: it came from there."""
        for event in events:
            if event.partition >= self._num_partitions:  # told of a tier
                continue
            key = event.partition, event.name
            if not event.is_known:
                self.num_lost += key in self._waiting or key in self._aside
                self._waiting.discard(key)
                self._aside.pop(key, None)
            elif event.name not in below and key not in self._waiting:
                self._take_up(event)

    def _take_up(self, event: PrefixEvent) -> None:
        if len(self._waiting) >= self._max_blocks:
            self.num_dropped += 1
            return
        if len(self._queue) >= 2 * self._max_blocks:  # half of them or more wait no longer
            self._queue = deque(each for each in self._queue if (each.partition, each.name) in self._waiting)
        self._waiting.add((event.partition, event.name))
        self._queue.append(event)

    def take(self, max_blocks: int, now_s: float) -> Piece | None:
        """The oldest, with those of its partition that follow it closely; None: nothing waits.

        The caller writes them and tells `wrote`, or says nothing of them any more. Seconds of any one clock.
        """
        if self._aside and now_s >= self._again_at_s:
            return self._take_aside(max_blocks)
        taken = list[PrefixEvent]()
        while self._queue and len(taken) < max_blocks:
            event = self._queue[0]
            is_waiting = (event.partition, event.name) in self._waiting
            if taken and is_waiting and event.partition != taken[0].partition:
                break
            self._queue.popleft()
            if is_waiting:
                self._waiting.discard((event.partition, event.name))
                taken.append(event)
        if not taken:
            return None
        return Piece(
            partition=taken[0].partition,
            names=tuple(event.name for event in taken),
            parents=tuple(event.parent for event in taken),
        )

    def wrote(self, piece: Piece, failed: Container[BlockName], now_s: float) -> None:
        """What of a piece some tier did not keep is set aside; where all was kept, what was set aside is soon tried."""
        lacking = piece.only(failed)
        if not lacking.names:
            self._again_at_s = min(self._again_at_s, now_s + AGAIN_S)
            self._pause_s = AGAIN_S
            return
        self._again_at_s = now_s + self._pause_s
        if piece.is_again:
            self._pause_s = min(2 * self._pause_s, MAX_AGAIN_S)
        for name, parent in zip(lacking.names, lacking.parents, strict=True):
            if len(self._aside) < self._max_blocks:
                self._aside[piece.partition, name] = parent
            else:
                self.num_dropped += 1

    def _take_aside(self, max_blocks: int) -> Piece:
        partition = next(iter(self._aside))[0]
        keys = itertools.islice((key for key in self._aside if key[0] == partition), max_blocks)
        taken = {name: self._aside[partition, name] for _, name in keys}
        for name in taken:
            del self._aside[partition, name]
        return Piece(partition=partition, names=tuple(taken), parents=tuple(taken.values()), is_again=True)
