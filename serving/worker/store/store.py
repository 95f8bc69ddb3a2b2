"""A worker's tiers, as the worker sees them: what begins later for their sake, what is written down, what they cost."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import NAME_BYTES, Below, BlockName, split_names
from moonshard.kv.store.tier import TierCounters, together
from moonshard.rpc import link_pb2
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import Plan, PrefillPlan
from moonshard.serving.control.tiers.fetches import FetchTimes
from moonshard.serving.control.tiers.writes import WriteQueue
from moonshard.serving.engine.busy import BusyTime
from moonshard.serving.engine.device import StepDone
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.steps import StepKind
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.report import store_message
from moonshard.serving.worker.store.fetching import FetchedFirst, Wanted
from moonshard.serving.worker.store.places import Place
from moonshard.serving.worker.store.writing import WriteThrough

MAX_QUEUED_BLOCKS = 4096  # names that wait to be written; fewer where the device has fewer pages, which are then reused
MAX_CAME = 4096
UPKEEP_S = 30.0
CLOSE_S = 5.0
HELD_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Process:
    """One that has tiers, and what is known of them."""

    index: int
    place: Place
    queue: WriteQueue
    writing: WriteThrough
    times: FetchTimes


class WorkerStore:
    """On the event loop. Without it a worker has its device's pages alone."""

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler,
        pool: BlockPool,
        places: Sequence[Place],
    ):
        """`places`: of each partition."""
        self._engine = engine
        self._scheduler = scheduler
        self._pool = pool
        self._each = [self._process(index, place) for index, place in enumerate(dict.fromkeys(places))]
        self._of = [self._each[scheduler.cache.spaces.process_of(partition)] for partition in range(len(places))]
        self._shared = {tier: shared for each in self._each for tier, shared in each.place.shared.items()}
        self._came = OrderedDict[bytes, Mapping[str, int]]()  # tokens by tier, of requests without a first token
        self.message = link_pb2.KvStore()  # as of the last tick
        self._busy = BusyTime()
        self._fetching = FetchedFirst(
            engine=engine,
            scheduler=scheduler,
            pool=pool,
            places=places,
            times=[each.times for each in self._of],
            on_found=self._on_found,
            on_fetched=lambda partition, names: self._of[partition].writing.came_up(names),
            on_came=self._on_came,
        )
        self._kept_up_s = time.monotonic()
        self._background = Background(engine.fail)
        for each in self._each:
            self._background.spawn(self._note_held(each))

    def _process(self, index: int, place: Place) -> "_Process":
        partitions = self._scheduler.cache.spaces.partitions_of(index)
        num_blocks = len(partitions) * self._pool.blocks_per_partition
        queue = WriteQueue(min(num_blocks, MAX_QUEUED_BLOCKS), partitions, tuple(place.shared))
        writing = WriteThrough(
            engine=self._engine,
            scheduler=self._scheduler,
            place=place,
            partitions=partitions,
            queue=queue,
            on_kept=lambda kept: self._note_kept(index, kept),
        )
        return _Process(index, place, queue, writing, FetchTimes(self._pool.block_size))

    # ---- requests

    def begin(self, run: link_pb2.Run, link: Link, begin: Callable[[], None]) -> None:
        """Calls `begin` once blocks of the prompt came up that are worth waiting for: now, where there are none.

        The partition is chosen now, where the message leaves it open, and written into the message.
        """
        num_full = len(run.prompt_tokens) // self._pool.block_size
        is_named = 0 < len(run.block_names) == num_full * NAME_BYTES
        if not is_named or run.HasField("prompt_logprobs"):  # these are computed, all of them
            begin()
            return
        partition = wire.partition_from(run)
        run.partition = self._scheduler.emptiest() if partition is None else partition
        if not 0 <= run.partition < self._pool.num_partitions:
            begin()  # which refuses it
            return

        wanted = Wanted(partition=run.partition, names=split_names(run.block_names))

        def begin_now(tokens: Mapping[str, int]) -> None:
            if tokens:
                self._on_came(run.request_id, tokens)
            begin()
            self._of[wanted.partition].writing.renew(wanted.partition, wanted.names)

        self._fetching.begin(run.request_id, wanted, link, begin_now)

    def drop(self, request_id: bytes, link: Link) -> None:
        self._fetching.drop(request_id, link)
        self._came.pop(request_id, None)

    def close_link(self, link: Link) -> None:
        self._fetching.close_link(link)

    def came(self, request_id: bytes) -> Mapping[str, int]:
        """The tokens of its prompt that came from each tier. Told once, with its first token."""
        return self._came.pop(request_id, {})

    @property
    def num_waiting(self) -> int:
        return self._fetching.num_waiting

    def waiting_tokens(self, partition: int) -> int:
        return self._fetching.waiting_tokens(partition)

    # ---- the engine's steps, and time

    def tick(self) -> None:
        for each in self._each:
            each.writing.tick()
        self._fetching.tick()
        if time.monotonic() - self._kept_up_s > UPKEEP_S:
            self._kept_up_s = time.monotonic()
            for each in self._each:
                each.place.upkeep()
        queues = [each.queue for each in self._each]
        self.message = store_message(self._counters(), queues, num_late=self._fetching.num_late, shares=self._shares())

    def on_done(self, done: StepDone, plan: Plan | None) -> None:
        seconds = self._busy.added_ns(done.launched_ns, done.done_ns) / 1e9
        if isinstance(plan, PrefillPlan):
            num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
            for each in self._each:
                each.times.computed(num_tokens, seconds)
        elif done.kind is StepKind.LAND:
            self._of[done.partition].times.landed(done.num_blocks, seconds)
        for each in self._each:
            each.writing.step_ended()

    async def flush(self) -> None:
        """Writes down what waits."""
        await asyncio.gather(*(each.writing.flush() for each in self._each))

    def close(self) -> None:
        """Blocks, for a few seconds at the most. What has not been written by now is not."""
        for each in self._each:
            each.writing.close()
            each.place.stop()

        def close_all() -> None:
            for each in self._each:
                each.place.close()

        closing = threading.Thread(target=close_all, name="tier-close", daemon=True)  # which may hang, too
        closing.start()
        closing.join(CLOSE_S)

    def _counters(self) -> Mapping[str, TierCounters]:
        """Of each tier in all processes that have it."""
        found = [each.place.counters for each in self._each]
        return {tier: together([each[tier] for each in found if tier in each]) for tier in self._shared}

    def _shares(self) -> Mapping[Below, float]:
        """How long fetching takes beside computing, from the slowest tier of each kind."""
        shares: dict[Below, list[float]] = {below: [] for below in Below}
        for each in self._each:
            for tier in each.place.shared:
                shares[self._below(tier)].append(each.times.share(tier))
        return {below: max(found, default=1.0) for below, found in shares.items()}  # without such a tier none is saved

    def _on_found(self, partition: int, chain: Sequence[BlockName], tiers: Sequence[str | None]) -> None:
        cache, process = self._scheduler.cache, self._of[partition].index
        gone = [name for name, tier in zip(chain, tiers, strict=True) if tier is None]
        for below in Below:
            cache.note_below(below, gone, is_known=False, process=process)
        for tier in self._shared:
            here = [name for name, each in zip(chain, tiers, strict=True) if each == tier]
            cache.note_below(self._below(tier), here, process=process)

    async def _note_held(self, process: "_Process") -> None:
        async for held in process.place.held():
            self._note_kept(process.index, held)
            await asyncio.sleep(HELD_PAUSE_S)  # it serves meanwhile

    def _note_kept(self, process: int, kept: Mapping[str, Sequence[BlockName]]) -> None:
        for tier, names in kept.items():
            self._scheduler.cache.note_below(self._below(tier), names, process=process)

    def _below(self, tier: str) -> Below:
        return Below.SHARED if self._shared[tier] else Below.OWN

    def _on_came(self, request_id: bytes, tokens: Mapping[str, int]) -> None:
        self._came[request_id] = tokens
        if len(self._came) > MAX_CAME:  # of requests that ended without a first token
            self._came.popitem(last=False)
