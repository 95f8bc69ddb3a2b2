"""Takes complete blocks down: read from the device behind all that was launched, kept by the tiers on a thread.

Little at a time, since reading them takes the device's time: a piece with each tick, and one right behind the other
while the queue is long, or before the end. One piece at a time is under way.
"""

import asyncio
import math
import time
from collections.abc import Callable

import numpy as np

from moonshard.kv.prefix import BlockName, PrefixEvent
from moonshard.kv.store.stack import TierStack
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.tiers.writes import Piece, WriteQueue
from moonshard.serving.engine.engine import Engine
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.store.threads import TierThreads

PIECE_BLOCKS = 8


class WriteThrough:
    """On the event loop. `tick` is called now and then, `step_ended` after each step."""

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler,
        num_partitions: int,
        stack: TierStack,
        queue: WriteQueue,
        threads: TierThreads,
        on_kept: Callable[[dict[str, list[BlockName]]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`on_kept` is told the names that each tier has now."""
        self._on_kept = on_kept
        self._clock = clock
        self._engine = engine
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._num_partitions = num_partitions
        self._stack = stack
        self._queue = queue
        self._threads = threads
        self._next_event = self._cache.num_events
        self._from_below = dict[BlockName, None]()  # fetched, and not yet told of by the cache
        self._is_busy = False  # with one piece
        self._to_read: Piece | None = None  # that piece, until a moment comes to read it
        self._is_flushing = False
        self._written = asyncio.Event()  # a piece
        self._background = Background(engine.fail)

    def came_up(self, names: tuple[BlockName, ...]) -> None:
        """The cache is about to learn these, which some tier has."""
        self._from_below.update(dict.fromkeys(names))

    def tick(self) -> None:
        self._learn()
        self._begin()

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

    def _learn(self) -> None:
        events = self._cache.events_from(self._next_event)
        self._next_event = self._cache.num_events
        if events is None:  # it fell far behind: all there is now, in whatever order
            known = [(each, name) for each in range(self._num_partitions) for name in self._cache.snapshot(each)]
            events = tuple(PrefixEvent(0, partition, name, is_known=True) for partition, name in known)
        self._queue.note(events, self._from_below)
        self._from_below.clear()

    def _begin(self) -> None:
        if self._is_busy or self._threads.is_closed:
            return
        now_s = math.inf if self._is_flushing else self._clock()  # then none has time to wait
        if (piece := self._queue.take(PIECE_BLOCKS, now_s)) is not None:
            self._is_busy = True
            self._background.spawn(self._find_lacking(piece))

    async def _find_lacking(self, piece: Piece) -> None:
        chains = [piece.names[chain] for chain in piece.chains()]
        self._to_read = piece.only(await self._threads.write(self._stack.lacking, chains))
        self._read()

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

        def on_done(pages: np.ndarray) -> None:
            self._background.spawn(self._keep(piece, pages))

        self._engine.export(piece.partition, [blocks[name] for name in piece.names], on_done)

    def _blocks_of(self, piece: Piece) -> dict[BlockName, int]:
        """Those that still have these names."""
        found = {name: self._cache.match(piece.partition, (name,)) for name in piece.names}
        return {name: blocks[0] for name, blocks in found.items() if blocks}

    async def _keep(self, piece: Piece, pages: np.ndarray) -> None:
        rows = np.ascontiguousarray(pages).reshape(len(piece.names), -1).view(np.uint8)
        chains = [(piece.parents[chain.start], piece.names[chain], rows[chain]) for chain in piece.chains()]
        kept = await self._threads.write(self._stack.keep, chains)
        self._on_kept(kept)
        if not self._is_flushing:  # which tries each once
            failed = {name for names in kept.values() for name in set(piece.names).difference(names)}
            self._queue.wrote(piece, failed, self._clock())
        self._end()

    def _end(self) -> None:
        self._is_busy = False
        self._written.set()
        if self._is_flushing or self._queue.is_long:
            self._begin()
