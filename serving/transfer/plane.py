"""A process's end of the KV plane: its slab, its transport, and the two copies between slab and pages' bytes.

A prefill worker stages pages into its slab and publishes from it; a decode worker's slab is written by others, and what
is landed from it is a private copy that matched its checksums. Long copies run on threads of their own, since the event
loop must not wait; short ones do not, since the way to a thread and back takes longer than they do. Which cells are
whose is decided in `control.handoff`; the pages are the engine's. Of a worker of several processes each has a plane
with the parts of blocks that its own devices carry; the leader has them all do the same (`serving.gang.plane`).
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from moonshard.kv.pieces import BlockPieces, pieces_of
from moonshard.kv.slab import Slab
from moonshard.kv.slab_shards import SlabShards, cut_by_partition
from moonshard.kv.transfer import (
    ChecksumMismatch,
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    Transport,
    TransportCounters,
    copy_verified,
    worst_of,
)
from moonshard.serving.transfer.endpoint import Cells, Endpoint, Place, copies_between, plan_to
from moonshard.sharding import reshard
from moonshard.sharding.layout import Layout, LayoutMismatch, Tile, check_alike

NUM_COPY_THREADS = 2
MAX_BYTES_AT_ONCE = 1024 * 1024  # copied and checked in 0.05 ms, 0.1 at p99 (measured)


class Plane(Protocol):
    """A worker's KV plane: of one process, or of all members of a gang. A ticket is the handoffs' name for a piece of
    work: blocks that are staged and written together, or copied out and landed together.
    """

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def num_partitions(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def counters(self) -> TransportCounters: ...
    @property
    def num_mismatches(self) -> int: ...
    @property
    def num_landed_blocks(self) -> int: ...

    async def stage(
        self, ticket: int, partition: int, cells: Sequence[int], pages: np.ndarray, pieces: tuple[Tile, ...]
    ) -> tuple[int, ...]:
        """Fill own cells with blocks' pages, [cells, layers, block_size, features], which an export of this ticket
        read; of each cell the checksums of all pieces.
        """
        ...

    async def publish(
        self, partition: int, cells: Sequence[int], to: Endpoint, to_partition: int, to_cells: Sequence[int]
    ) -> PublishResult:
        """Write own cells into cells of another's slabs, pairwise, and clear them.

        TransferFailed: part may have landed and the rest may follow, so they are not all cleared.
        """
        ...

    async def copy_out(
        self,
        ticket: int,
        partition: int,
        cells: Sequence[int],
        checksums: Sequence[int],
        pieces: tuple[Tile, ...] = (),
    ) -> str | None:
        """Make a private copy of cells, to be had by `take`; or what is wrong with it, in words, and there is none.

        The cells are cleared in either case. No `pieces`: of each cell one checksum.
        """
        ...

    def take(self, ticket: int) -> np.ndarray:
        """What was copied out, as pages [cells, layers, block_size, features], for a land of this ticket."""
        ...

    def drop(self, ticket: int) -> bool:
        """What was copied out under this ticket is not wanted. False where it was taken, or there is none."""
        ...

    def clear(self, partition: int, cells: Sequence[int]) -> None:
        """Clears cells that came back, so that they hold nothing of what was sent through them. What a late writer
        writes there afterwards remains.
        """
        ...

    def close(self) -> None:
        """Fails the copies that are under way."""
        ...


def pieces_to(source: Endpoint, destination: Endpoint) -> tuple[Tile, ...]:
    """The pieces by which blocks are checked on their way there; none for blocks as a whole.

    Raises what `reshard.plan` raises.
    """
    [whole] = {group.block.tile for group in source.layout.groups}
    pieces = reshard.pieces(source.layout.groups[0], destination.layout.groups[0])
    return () if pieces == (whole,) else pieces


class KvPlane:
    """`slab` has the cells of all partitions, one after another; each holds a block, cut as `layout` says.

    Pages and cells are what this process has of a block: in a gang that may be some of its layers or tokens, or none.
    """

    def __init__(
        self,
        transport: Transport,
        slab: Slab,
        *,
        name: str,
        layout: Layout,
        fingerprint: str,
        num_partitions: int,
        held: Sequence[Collection[int]] | None = None,
        num_cells: int | None = None,
    ):
        """`held`: of each partition the owners whose shards are here; None: all. `num_cells`: per partition; None: as
        many whole blocks as the slab has cells. ValueError where the slab is too small.
        """
        check_alike("source", layout)
        self._group = layout.groups[0]
        self._transport = transport
        self._slab = slab
        num_cells = slab.num_cells // num_partitions if num_cells is None else num_cells
        owners = frozenset(shard.owner for shard in self._group.shards)
        self._shards = cut_by_partition(slab, self._group, held or [owners] * num_partitions, num_cells)
        self._dtype = jnp.dtype(self._group.block.dtype)
        self._threads = ThreadPoolExecutor(NUM_COPY_THREADS, thread_name_prefix="kv-copy")
        self._copies: dict[int, np.ndarray] = {}  # private ones that are intact, by ticket
        self.num_partitions = num_partitions
        self.num_mismatches = 0
        self.num_landed_blocks = 0
        regions = {
            Place(partition, owner): region
            for partition, shards in enumerate(self._shards)
            for owner, region in shards.regions.items()
        }
        self.endpoint = Endpoint(
            transport=name,
            session=transport.session,
            num_cells=num_cells,
            regions=regions,
            sessions=dict.fromkeys(regions, transport.session),
            layout=layout,
            fingerprint=fingerprint,
        )
        transport.register(slab)

    @property
    def counters(self) -> TransportCounters:
        return self._transport.counters

    @property
    def block_bytes(self) -> int:
        """Of a whole block."""
        block = self._group.block
        return block.num_layers * block.block_size * block.num_features * block.itemsize_bytes

    async def stage(
        self, ticket: int, partition: int, cells: Sequence[int], pages: np.ndarray, pieces: tuple[Tile, ...]
    ) -> tuple[int, ...]:
        """See `Plane`. The checksums of pieces that are other members' are 0."""
        del ticket  # of one process the pages are at hand
        shards, sums = self._shards[partition], self._pieces(partition, pieces)
        return await self._run(pages.nbytes, _stage, shards, cells, pages, sums)

    async def publish(
        self, partition: int, cells: Sequence[int], to: Endpoint, to_partition: int, to_cells: Sequence[int]
    ) -> PublishResult:
        """See `Plane`. Of several processes there, each is written to at once; all have ended when this does."""
        copies = self._copies_to(Cells(self.endpoint, partition, cells), Cells(to, to_partition, to_cells))
        writes = [asyncio.wrap_future(self._transport.publish(session, each)) for session, each in copies.items()]
        if writes:
            await asyncio.wait(writes)
        if failures := [failure for write in writes if (failure := write.exception()) is not None]:
            raise worst_of(failures)
        await self._run(len(cells) * self.block_bytes, self.clear, partition, cells)
        return PublishResult.of_all(write.result() for write in writes)

    async def copy_out(
        self,
        ticket: int,
        partition: int,
        cells: Sequence[int],
        checksums: Sequence[int],
        pieces: tuple[Tile, ...] = (),
    ) -> str | None:
        """See `Plane`. Checks the pieces that are here."""
        shards, num_bytes = self._shards[partition], len(cells) * self._shards[partition].cell_bytes
        try:
            copied = await self._run(num_bytes, self._take_out, shards, cells, checksums, pieces)
        except (ChecksumMismatch, LayoutMismatch) as mismatch:
            self.num_mismatches += 1
            return str(mismatch)
        self.num_landed_blocks += len(cells)
        layers, tokens, _ = shards.block_shape
        pages = copied.view(self._dtype) if copied.size else np.empty((len(cells), 0), self._dtype)
        self._copies[ticket] = pages.reshape(len(cells), layers, tokens, self._group.block.num_features)
        return None

    def take(self, ticket: int) -> np.ndarray:
        return self._copies.pop(ticket)

    def drop(self, ticket: int) -> bool:
        return self._copies.pop(ticket, None) is not None

    def clear(self, partition: int, cells: Sequence[int]) -> None:
        _clear(self._shards[partition], cells)

    def close(self) -> None:
        self._transport.close()
        self._threads.shutdown(wait=True)

    def _copies_to(self, source: Cells, destination: Cells) -> dict[str, Copies]:
        """The copies to be made. TransferFailed where the other slabs' cells have no addresses, or two of them the same
        one.
        """
        try:
            return dict(copies_between(source, destination, plan_to(source.endpoint, destination.endpoint)))
        except (ValueError, KeyError, OverflowError) as error:
            there = f"slots {list(destination.cells)} of partition {destination.partition}"
            detail = f"{there} at {destination.endpoint.session}: {error}"
            raise TransferFailed(FailureCause.BAD_RANGE, detail, may_still_land=False) from error

    def _pieces(self, partition: int, pieces: tuple[Tile, ...]) -> BlockPieces:
        return pieces_of(self._group.block, self._shards[partition].own, pieces)

    def _take_out(
        self, shards: SlabShards, cells: Sequence[int], checksums: Sequence[int], pieces: tuple[Tile, ...]
    ) -> np.ndarray:
        try:
            return copy_verified(shards, cells, checksums, pieces_of(self._group.block, shards.own, pieces))
        finally:
            _clear(shards, cells)

    async def _run[*Ts, T](self, num_bytes: int, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        if num_bytes <= MAX_BYTES_AT_ONCE:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _stage(shards: SlabShards, cells: Sequence[int], pages: np.ndarray, pieces: BlockPieces) -> tuple[int, ...]:
    blocks = np.ascontiguousarray(pages).reshape(len(cells), -1).view(np.uint8)
    for cell, block in zip(cells, blocks, strict=True):
        shards.fill_cell(cell, block)
    sums = (pieces.checksums(block) for block in blocks)
    return tuple(each.get(piece, 0) for each in sums for piece in range(pieces.num_pieces))


def _clear(shards: SlabShards, cells: Sequence[int]) -> None:
    for cell in cells:
        shards.clear_cell(cell)
