"""A worker's end of the KV plane: its slab, its transport, and the two copies between slab and pages' bytes.

A prefill worker stages pages into its slab and publishes from it; a decode worker's slab is written by others, and what
is landed from it is a private copy that matched its checksums. Long copies run on threads of their own, since the event
loop must not wait; short ones do not, since the way to a thread and back takes longer than they do. Left out: which
slots are whose (`serving.handoff`), and the pages themselves.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

from moonshard.kv.slab import Slab
from moonshard.kv.slab_shards import SlabShards
from moonshard.kv.transfer import (
    ChecksumMismatch,
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    Transport,
    TransportCounters,
    checksum,
    copy_verified,
)
from moonshard.serving.transfer.endpoint import Endpoint, copies_between, plan_to
from moonshard.sharding.layout import Layout

NUM_COPY_THREADS = 2
MAX_BYTES_AT_ONCE = 1024 * 1024  # copied and checked in 0.05 ms, 0.1 at p99 (measured)


class KvPlane:
    """`slab` has the slots of all partitions, one after another; each holds a block, cut as `layout` says."""

    def __init__(
        self, transport: Transport, slab: Slab, *, name: str, layout: Layout, fingerprint: str, num_partitions: int
    ):
        (group,) = layout.groups
        self._transport = transport
        self._slab = slab
        self._shards = SlabShards(slab, group)
        self._block_shape = (group.block.num_layers, group.block.block_size, group.block.num_features)
        self._dtype = jnp.dtype(group.block.dtype)
        self._threads = ThreadPoolExecutor(NUM_COPY_THREADS, thread_name_prefix="kv-copy")
        self.num_partitions = num_partitions
        self.num_mismatches = 0
        self.num_landed_blocks = 0
        self.endpoint = Endpoint(
            transport=name,
            session=transport.session,
            num_slots=slab.num_slots // num_partitions,
            regions=self._shards.regions,
            layout=layout,
            fingerprint=fingerprint,
        )
        transport.register(slab)

    @property
    def counters(self) -> TransportCounters:
        return self._transport.counters

    @property
    def block_bytes(self) -> int:
        return self._slab.slot_bytes

    async def stage(self, partition: int, slots: Sequence[int], pages: np.ndarray) -> tuple[int, ...]:
        """Fill own slots with blocks' pages, [slots, layers, block_size, features]; the checksums of what they hold."""
        return await self._run(pages.nbytes, self._stage, self.endpoint.slots(partition, slots).tolist(), pages)

    async def publish(
        self, partition: int, slots: Sequence[int], to: Endpoint, to_partition: int, to_slots: Sequence[int]
    ) -> PublishResult:
        """Write own slots into slots of another's slab, pairwise, and clear them.

        TransferFailed: part may have landed and the rest may follow, so they are as they were.
        """
        copies = self._copies(partition, slots, to, to_partition, to_slots)
        future: Future[PublishResult] = self._transport.publish(to.session, copies)
        result = await asyncio.shield(asyncio.wrap_future(future))
        await self._run(len(slots) * self.block_bytes, self.clear, partition, slots)
        return result

    async def copy_out(
        self, partition: int, slots: Sequence[int], expected: Sequence[int]
    ) -> np.ndarray | ChecksumMismatch:
        """A private copy of slots as pages, [slots, layers, block_size, features], or what is wrong with it.

        The slots are cleared in either case.
        """
        try:
            own_slots = self.endpoint.slots(partition, slots).tolist()
            num_bytes = len(own_slots) * self.block_bytes
            copied = await self._run(num_bytes, self._take_out, own_slots, expected)
        except ChecksumMismatch as mismatch:
            self.num_mismatches += 1
            return mismatch
        self.num_landed_blocks += len(slots)
        return copied.view(self._dtype).reshape(len(slots), *self._block_shape)

    def clear(self, partition: int, slots: Sequence[int]) -> None:
        """Slots that come back hold nothing of what was sent through them; what a late writer writes there stays."""
        self._clear(self.endpoint.slots(partition, slots).tolist())

    def close(self) -> None:
        """Fails what is under way."""
        self._transport.close()
        self._threads.shutdown(wait=True)

    def _copies(
        self, partition: int, slots: Sequence[int], to: Endpoint, to_partition: int, to_slots: Sequence[int]
    ) -> Copies:
        """TransferFailed where the other's slots are at no addresses, or two of them at one."""
        own_slots = self.endpoint.slots(partition, slots)
        try:
            return copies_between(
                self.endpoint, own_slots, to, to.slots(to_partition, to_slots), plan_to(self.endpoint, to)
            )
        except (ValueError, KeyError, OverflowError) as error:
            detail = f"slots {list(to_slots)} of partition {to_partition} at {to.session}: {error}"
            raise TransferFailed(FailureCause.BAD_RANGE, detail, may_still_land=False) from error

    def _take_out(self, own_slots: list[int], expected: Sequence[int]) -> np.ndarray:
        try:
            return copy_verified(self._shards, own_slots, expected)
        finally:
            self._clear(own_slots)

    def _clear(self, own_slots: list[int]) -> None:
        for slot in own_slots:
            self._shards.clear_slot(slot)

    def _stage(self, slots: list[int], pages: np.ndarray) -> tuple[int, ...]:
        blocks = np.ascontiguousarray(pages).reshape(len(slots), -1).view(np.uint8)
        for slot, block in zip(slots, blocks, strict=True):
            self._shards.fill_slot(slot, block)
        return tuple(map(checksum, blocks))

    async def _run[*Ts, T](self, num_bytes: int, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        if num_bytes <= MAX_BYTES_AT_ONCE:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
