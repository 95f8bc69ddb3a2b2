"""Takes complete blocks down: read from the device behind all that was launched, kept by the tiers on a thread.

Little at a time, since reading them takes the device's time: a piece with each tick, and one right behind the other
while the queue is long, or before the end. One piece at a time is under way.

What a tier has lost of a chain that is still asked for here, nobody would write again: the device has it, and whoever
finds it there asks no tier. So a prompt that begins has its whole chain looked for in every tier, behind all else. That
is also what tells Mooncake Store, which evicts what was asked about longest ago and knows no chains, that their
beginnings are in use.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from moonshard.kv.prefix import BlockName, PrefixEvent
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.tiers.piece import Piece
from moonshard.serving.control.tiers.writes import WriteQueue
from moonshard.serving.engine.engine import Engine
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.store.places import Place

PIECE_BLOCKS = 8
MAX_RENEWALS = 64  # chains that wait to be looked for


class WriteThrough:
    """Of one process, so that none waits for another's disk. On the event loop. `tick` is called now and then,
    `step_ended` after each step.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler,
        place: Place,
        partitions: Sequence[int],
        queue: WriteQueue,
        on_kept: Callable[[dict[str, list[BlockName]]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`partitions`: whose blocks go down, to `place`. `on_kept` is told the names that each tier has now."""
        self._on_kept = on_kept
        self._clock = clock
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._place = place
        self._partitions = partitions
        self._queue = queue
        self._is_closed = False
        self._next_event = self._cache.num_events
        self._from_below = dict[BlockName, None]()  # fetched, and not yet told of by the cache
        self._is_busy = False  # with one piece
        self._to_read: Piece | None = None  # that piece, until a moment comes to read it
        self._is_flushing = False
        self._written = asyncio.Event()  # a piece
        self._renewals = OrderedDict[tuple[int, BlockName], Sequence[BlockName]]()  # by their last block
        self._is_renewing = False
        self._background = Background(engine.fail)

    def came_up(self, names: Sequence[BlockName]) -> None:
        """The cache is about to learn these, which some tier has."""
        self._from_below.update(dict.fromkeys(names))

    def renew(self, partition: int, chain: Sequence[BlockName]) -> None:
        """A request uses these blocks: some tier should have them for all who look there, and count them as used."""
        if chain:
            self._renewals[partition, chain[-1]] = chain
            self._renewals.move_to_end((partition, chain[-1]))
            if len(self._renewals) > MAX_RENEWALS:
                self._renewals.popitem(last=False)

    def tick(self) -> None:
        self._learn()
        self._begin()
        self._renew()

    def step_ended(self) -> None:
        self._read()

    async def flush(self) -> None:
        """Writes all that waits. Whoever waits for it may give up at any time."""
        self._is_flushing = True
        self.tick()
        while self._is_busy:
            self._written.clear()
            await self._written.wait()
            self.tick()

    def close(self) -> None:
        """Nothing more is begun."""
        self._is_closed = True

    def _learn(self) -> None:
        events = self._cache.events_from(self._next_event)
        self._next_event = self._cache.num_events
        if events is None:  # it fell far behind: all there is now, in whatever order
            known = [(each, name) for each in self._partitions for name in self._cache.snapshot(each)]
            events = tuple(PrefixEvent(0, partition, name, is_known=True) for partition, name in known)
        self._queue.note(events, self._from_below)
        self._from_below.clear()

    def _begin(self) -> None:
        if self._is_busy or self._is_closed:
            return
        take_last = self._queue.take_last
        piece = take_last(PIECE_BLOCKS) if self._is_flushing else self._queue.take(PIECE_BLOCKS, self._clock())
        if piece is not None:
            self._is_busy = True
            self._background.spawn(self._find_lacking(piece))

    async def _find_lacking(self, piece: Piece) -> None:
        chains = [piece.names[chain] for chain in piece.chains()]
        self._to_read = piece.only(await self._place.lacking(chains, piece.again_for))
        self._read()

    def _renew(self) -> None:
        if self._renewals and not (self._is_renewing or self._is_flushing or self._is_closed):
            (partition, _), chain = self._renewals.popitem(last=False)
            self._is_renewing = True
            self._background.spawn(self._find_lost(partition, chain))

    async def _find_lost(self, partition: int, chain: Sequence[BlockName]) -> None:
        """Of what the device has. The rest is for others to keep, or is about to be written anyway."""
        lost = await self._place.renew(chain)
        whole = Piece(partition=partition, names=tuple(chain), parents=(None, *chain[:-1]))
        for tier, names in lost.items():
            piece = whole.only(self._blocks_of(whole.only(set(names))))
            self._queue.found_lacking(tier, piece, self._clock())
        self._is_renewing = False

    def _read(self) -> None:
        """Nobody holds the blocks: whatever writes over them is launched behind this.

        But what the cache knows may still have to be written, by a step that is decided and not launched.
        """
        if self._to_read is None or self._scheduler.has_unlaunched:
            return
        piece, self._to_read = self._to_read, None
        blocks = self._blocks_of(piece)
        piece = piece.only(blocks)
        if not piece.names:
            self._end()
            return

        kept = self._place.keep(piece, [blocks[name] for name in piece.names])
        self._background.spawn(self._note_kept(piece, kept))

    def _blocks_of(self, piece: Piece) -> dict[BlockName, int]:
        """Those that still have these names."""
        found = {name: self._cache.match(piece.partition, (name,)) for name in piece.names}
        return {name: blocks[0] for name, blocks in found.items() if blocks}

    async def _note_kept(self, piece: Piece, keeping: Awaitable[dict[str, list[BlockName]]]) -> None:
        kept = await keeping
        self._on_kept(kept)
        if not self._is_flushing:  # which tries each once
            self._queue.wrote(piece, kept, self._clock())
        self._end()

    def _end(self) -> None:
        self._is_busy = False
        self._written.set()
        if self._is_flushing or self._queue.is_long:
            self._begin()
