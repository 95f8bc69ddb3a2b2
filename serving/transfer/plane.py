"""A worker's end of the KV plane: its slab, its transport, and the two copies between slab and pages' bytes.

A prefill worker stages pages into its slab and publishes from it; a decode worker's slab is written by others, and what
is landed from it is a private copy that matched its checksums. Long copies run on threads of their own, since the event
loop must not wait; short ones do not, since the way to a thread and back takes longer than they do. Which cells are
whose is decided in `control.handoff`; the pages are the engine's.
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
from moonshard.sharding.layout import Layout, check_alike

NUM_COPY_THREADS = 2
MAX_BYTES_AT_ONCE = 1024 * 1024  # copied and checked in 0.05 ms, 0.1 at p99 (measured)


class KvPlane:
    """`slab` has the cells of all partitions, one after another; each holds a block, cut as `layout` says."""

    def __init__(
        self, transport: Transport, slab: Slab, *, name: str, layout: Layout, fingerprint: str, num_partitions: int
    ):
        check_alike("source", layout)
        group = layout.groups[0]
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
            num_cells=slab.num_cells // num_partitions,
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
        return self._slab.cell_bytes

    async def stage(self, partition: int, cells: Sequence[int], pages: np.ndarray) -> tuple[int, ...]:
        """Fill own cells with blocks' pages, [cells, layers, block_size, features]; the checksums of what they hold."""
        return await self._run(pages.nbytes, self._stage, self.endpoint.cells(partition, cells).tolist(), pages)

    async def publish(
        self, partition: int, cells: Sequence[int], to: Endpoint, to_partition: int, to_cells: Sequence[int]
    ) -> PublishResult:
        """Write own cells into cells of another's slab, pairwise, and clear them.

        TransferFailed: part may have landed and the rest may follow, so they are as they were.
        """
        copies = self._copies(partition, cells, to, to_partition, to_cells)
        future: Future[PublishResult] = self._transport.publish(to.session, copies)
        result = await asyncio.shield(asyncio.wrap_future(future))
        await self._run(len(cells) * self.block_bytes, self.clear, partition, cells)
        return result

    async def copy_out(
        self, partition: int, cells: Sequence[int], expected: Sequence[int]
    ) -> np.ndarray | ChecksumMismatch:
        """A private copy of cells as pages, [cells, layers, block_size, features], or what is wrong with it.

        The cells are cleared in either case.
        """
        try:
            own_cells = self.endpoint.cells(partition, cells).tolist()
            num_bytes = len(own_cells) * self.block_bytes
            copied = await self._run(num_bytes, self._take_out, own_cells, expected)
        except ChecksumMismatch as mismatch:
            self.num_mismatches += 1
            return mismatch
        self.num_landed_blocks += len(cells)
        return copied.view(self._dtype).reshape(len(cells), *self._block_shape)

    def clear(self, partition: int, cells: Sequence[int]) -> None:
        """Clears cells that came back, so that they hold nothing of what was sent through them. What a late writer
        writes there afterwards remains.
        """
        self._clear(self.endpoint.cells(partition, cells).tolist())

    def close(self) -> None:
        """Fails the copies that are under way."""
        self._transport.close()
        self._threads.shutdown(wait=True)

    def _copies(
        self, partition: int, cells: Sequence[int], to: Endpoint, to_partition: int, to_cells: Sequence[int]
    ) -> Copies:
        """The copies to be made. TransferFailed where the other slab's cells have no addresses, or two of them the same
        one.
        """
        own_cells = self.endpoint.cells(partition, cells)
        try:
            return copies_between(
                self.endpoint, own_cells, to, to.cells(to_partition, to_cells), plan_to(self.endpoint, to)
            )
        except (ValueError, KeyError, OverflowError) as error:
            detail = f"slots {list(to_cells)} of partition {to_partition} at {to.session}: {error}"
            raise TransferFailed(FailureCause.BAD_RANGE, detail, may_still_land=False) from error

    def _take_out(self, own_cells: list[int], expected: Sequence[int]) -> np.ndarray:
        try:
            return copy_verified(self._shards, own_cells, expected)
        finally:
            self._clear(own_cells)

    def _clear(self, own_cells: list[int]) -> None:
        for cell in own_cells:
            self._shards.clear_cell(cell)

    def _stage(self, cells: list[int], pages: np.ndarray) -> tuple[int, ...]:
        blocks = np.ascontiguousarray(pages).reshape(len(cells), -1).view(np.uint8)
        for cell, block in zip(cells, blocks, strict=True):
            self._shards.fill_cell(cell, block)
        return tuple(map(checksum, blocks))

    async def _run[*Ts, T](self, num_bytes: int, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        if num_bytes <= MAX_BYTES_AT_ONCE:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
