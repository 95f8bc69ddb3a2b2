"""Which KV blocks go down to slower tiers next: a bounded queue of what the prefix cache has learnt.

Blocks go down because they are complete, not because they are about to be lost: when room is needed it is too late to
read them. The queue holds names alone. A block that is lost before its turn is written by nobody; where the queue is
full the newest is not taken up, so that of a chain the beginning goes down, without which its end is of no use.

What a tier did not keep, as while it is switched off, or lost since, is set aside for it (`aside`). It takes turns with
what is new, and waits where much is: what no tier has is lost first.
"""

from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from moonshard.kv.prefix import BlockName, PrefixEvent
from moonshard.serving.control.tiers.aside import Aside
from moonshard.serving.control.tiers.piece import Piece

LONG_SHARE = 0.125  # of what a queue may hold


class WriteQueue:
    """Told of all that the prefix cache learns and forgets, and of what came up from a tier and so is below already."""

    def __init__(self, max_blocks: int, partitions: Container[int], tiers: Sequence[str]):
        """`partitions`: whose blocks go down; the others' are for others to write."""
        self._max_blocks = max_blocks
        self._partitions = partitions
        self._queue = deque[PrefixEvent]()
        self._waiting = set[tuple[int, BlockName]]()
        self._aside = {tier: Aside(tier, max_blocks) for tier in tiers}
        self._is_turn_of_new = True
        self.num_dropped = 0  # the queue was full
        self.num_lost = 0  # the pool reused them first

    def __repr__(self) -> str:
        aside = f"{self.num_aside} aside"
        return f"WriteQueue({len(self)} wait, {aside}, {self.num_dropped} dropped, {self.num_lost} lost)"

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_aside(self) -> int:
        """Those that several tiers lack count for each."""
        return sum(map(len, self._aside.values()))

    @property
    def is_long(self) -> bool:
        """Whether it should be emptied faster than whoever has the device would like."""
        return len(self) > LONG_SHARE * self._max_blocks

    def note(self, events: Iterable[PrefixEvent], below: Container[BlockName] = ()) -> None:
        """Takes up what became known; `below` need not go down: it came from there."""
        for event in events:
            if event.partition not in self._partitions:
                continue
            key = event.partition, event.name
            if not event.is_known:
                self.num_lost += key in self._waiting
                self._waiting.discard(key)
                for aside in self._aside.values():
                    aside.forget(*key)
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
        """The next to be written; None: nothing waits, or not yet.

        The caller writes them and tells `wrote`. Seconds of any one clock.
        """
        aside = next((each for each in self._aside.values() if each.is_due(now_s)), None)
        if aside is None or (self._waiting and (self._is_turn_of_new or self.is_long)):
            self._is_turn_of_new = False
            return self._take_new(max_blocks)
        self._is_turn_of_new = True
        return aside.take(max_blocks)

    def take_last(self, max_blocks: int) -> Piece | None:
        """As `take`, at the end: what is new first, then whatever was set aside, each once. Nobody tells `wrote`."""
        if (piece := self._take_new(max_blocks)) is not None:
            return piece
        aside = next((each for each in self._aside.values() if len(each)), None)
        return None if aside is None else aside.take(max_blocks)

    def wrote(self, piece: Piece, kept: Mapping[str, Collection[BlockName]], now_s: float) -> None:
        """What each tier that was to keep a piece has of it now."""
        for tier, names in kept.items():
            self._aside[tier].wrote(piece, names, now_s)

    def found_lacking(self, tier: str, piece: Piece, now_s: float) -> None:
        """The device has these blocks, and the tier does not. Those that wait to be written anyway are no loss."""
        lost = piece.without({name for partition, name in self._waiting if partition == piece.partition})
        if lost.names:
            self._aside[tier].found_lacking(lost, now_s)

    def _take_new(self, max_blocks: int) -> Piece | None:
        """The oldest, with those of its partition that follow it closely."""
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
