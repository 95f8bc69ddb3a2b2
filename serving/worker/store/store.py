"""A worker's tiers, as the worker sees them: what begins later for their sake, what is written down, what they cost."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import NAME_BYTES, Below, BlockName, split_names
from moonshard.kv.store.stack import Fetched, TierStack
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
from moonshard.serving.worker.report import store_message
from moonshard.serving.worker.store.fetching import FetchedFirst, Wanted
from moonshard.serving.worker.store.threads import TierThreads
from moonshard.serving.worker.store.writing import WriteThrough
from moonshard.sharding.layout import BlockShape

MAX_QUEUED_BLOCKS = 4096  # names that wait to be written; fewer where the device has fewer pages, which are then reused
MAX_CAME = 4096
UPKEEP_S = 30.0
CLOSE_S = 5.0


class WorkerStore:
    """On the event loop. Without it a worker has its device's pages alone."""

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler,
        pool: BlockPool,
        stack: TierStack,
        block: BlockShape,
    ):
        self._stack = stack
        self._scheduler = scheduler
        self._pool = pool
        self._shape = (block.num_layers, block.block_size, block.num_features)
        self._dtype = jnp.dtype(block.dtype)
        self._threads = TierThreads()
        num_blocks = pool.num_partitions * pool.blocks_per_partition
        self._queue = WriteQueue(min(num_blocks, MAX_QUEUED_BLOCKS), pool.num_partitions, stack.names)
        self._came = OrderedDict[bytes, Mapping[str, int]]()  # tokens by tier, of requests without a first token
        self.message = link_pb2.KvStore()  # as of the last tick
        self._busy = BusyTime()
        self._times = FetchTimes(pool.block_size)
        self._writing = WriteThrough(
            engine=engine,
            scheduler=scheduler,
            num_partitions=pool.num_partitions,
            stack=stack,
            queue=self._queue,
            threads=self._threads,
            on_kept=self._on_kept,
        )
        self._fetching = FetchedFirst(
            engine=engine,
            scheduler=scheduler,
            pool=pool,
            stack=stack,
            times=self._times,
            threads=self._threads,
            as_pages=self._as_pages,
            on_found=self._on_found,
            on_fetched=self._on_fetched,
            on_came=self._on_came,
        )
        self._kept_up_s = time.monotonic()
        self._on_kept(stack.held())

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
            self._writing.renew(wanted.partition, wanted.names)

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
        self._writing.tick()
        self._fetching.tick()
        if time.monotonic() - self._kept_up_s > UPKEEP_S:
            self._kept_up_s = time.monotonic()
            self._threads.write_behind(self._stack.upkeep)
        self.message = store_message(
            self._stack.counters, self._queue, num_late=self._fetching.num_late, shares=self._shares()
        )

    def on_done(self, done: StepDone, plan: Plan | None) -> None:
        seconds = self._busy.added_ns(done.launched_ns, done.done_ns) / 1e9
        if isinstance(plan, PrefillPlan):
            self._times.computed(sum(len(chunk.tokens) for chunk in plan.chunks), seconds)
        elif done.kind is StepKind.LAND:
            self._times.landed(done.num_blocks, seconds)
        self._writing.step_ended()

    async def flush(self) -> None:
        """Writes down what waits."""
        await self._writing.flush()

    def close(self) -> None:
        """Blocks, for a few seconds at the most. What has not been written by now is not."""
        self._threads.close()
        closing = threading.Thread(target=self._stack.close, name="tier-close", daemon=True)  # which may hang, too
        closing.start()
        closing.join(CLOSE_S)

    def _as_pages(self, rows: np.ndarray) -> np.ndarray:
        return rows.view(self._dtype).reshape(len(rows), *self._shape)

    def _shares(self) -> Mapping[Below, float]:
        """How long fetching takes beside computing, from the slowest tier of each kind."""
        shares = dict.fromkeys(Below, 1.0)  # where there is no such tier nothing is saved
        for tier in self._stack.names:
            shares[self._below(tier)] = self._times.share(tier)
        return shares

    def _on_found(self, chain: Sequence[BlockName], tiers: Sequence[str | None]) -> None:
        gone = [name for name, tier in zip(chain, tiers, strict=True) if tier is None]
        for below in Below:
            self._scheduler.cache.note_below(below, gone, is_known=False)
        for tier in self._stack.names:
            here = [name for name, each in zip(chain, tiers, strict=True) if each == tier]
            self._scheduler.cache.note_below(self._below(tier), here)

    def _on_kept(self, kept: Mapping[str, Sequence[BlockName]]) -> None:
        for tier, names in kept.items():
            self._scheduler.cache.note_below(self._below(tier), names)

    def _below(self, tier: str) -> Below:
        return Below.SHARED if self._stack.is_shared(tier) else Below.OWN

    def _on_came(self, request_id: bytes, tokens: Mapping[str, int]) -> None:
        self._came[request_id] = tokens
        if len(self._came) > MAX_CAME:  # of requests that ended without a first token
            self._came.popitem(last=False)

    def _on_fetched(self, fetched: Fetched) -> None:
        self._writing.came_up(fetched.names)
        self._threads.write_behind(lambda: self._stack.promote(fetched))
