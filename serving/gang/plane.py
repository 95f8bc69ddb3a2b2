"""The KV plane of a gang, at its leader: each member stages, publishes and lands its own parts of blocks.

Handoffs see one plane. Which cells are whose is the same on all members; a block is written when every member has
written its part, and copied out when every member has verified its own: one that fails fails it for all. Bytes go from
each member's slab to the members that land them, and never through the leader.

Cells that come back from quarantine are cleared by each follower when it hears of it. Where that is later than the next
write into them, this is found by its checksum, and the handoff fails.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moonshard.kv.transfer import (
    FailureCause,
    PublishResult,
    TransferFailed,
    TransferMeter,
    TransportCounters,
    worst_of,
)
from moonshard.rpc import link_pb2
from moonshard.serving.gang.members import GangFault
from moonshard.serving.gang.orders import Answers, Orders
from moonshard.serving.transfer.endpoint import Endpoint, Place, endpoint_message, regions_from
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.wire.tiles import tile_message
from moonshard.sharding.layout import Tile


class GangPlane:
    """See `transfer.plane.Plane`. `own` is the leader's part, `members` what the followers have said of theirs."""

    def __init__(self, own: KvPlane, orders: Orders, members: Sequence[link_pb2.FollowerReady]):
        """GangFault where the parts of all are not a whole."""
        self._own = own
        self._orders = orders
        self._meter = TransferMeter()  # of the followers
        self.endpoint = _joined(own.endpoint, members, own.num_partitions)
        self.num_partitions = own.num_partitions
        self.block_bytes = own.block_bytes
        self.num_mismatches = 0
        self.num_landed_blocks = 0

    @property
    def counters(self) -> TransportCounters:
        return self._own.counters + self._meter.read()

    async def stage(
        self, ticket: int, partition: int, cells: Sequence[int], pages: np.ndarray, pieces: tuple[Tile, ...]
    ) -> tuple[int, ...]:
        """See `Plane`; `pages` are the leader's."""
        tiles = map(tile_message, pieces)
        order = link_pb2.KvStage(ticket=ticket, partition=partition, cells=cells, pieces=tiles)
        work = self._own.stage(ticket, partition, cells, pages, pieces)
        own, answers = await self._all(link_pb2.GangOrder(stage=order), work)
        if isinstance(own, BaseException):
            raise own
        parts = (answer.staged.checksums for answer in answers)
        return tuple(map(sum, zip(own, *parts, strict=True)))  # of each piece all but one are 0

    async def publish(
        self, partition: int, cells: Sequence[int], to: Endpoint, to_partition: int, to_cells: Sequence[int]
    ) -> PublishResult:
        """See `Plane`. When it returns or raises, no member writes any more."""
        order = link_pb2.KvPublish(
            partition=partition,
            cells=cells,
            endpoint=endpoint_message(to),
            to_partition=to_partition,
            to_cells=to_cells,
        )
        work = self._own.publish(partition, cells, to, to_partition, to_cells)
        own, answers = await self._all(link_pb2.GangOrder(publish=order), work)
        results = list(map(self._published, answers))
        failures = [result for result in (own, *results) if isinstance(result, BaseException)]
        if failures:
            raise worst_of(failures)
        return PublishResult.of_all(result for result in (own, *results) if isinstance(result, PublishResult))

    async def copy_out(
        self,
        ticket: int,
        partition: int,
        cells: Sequence[int],
        checksums: Sequence[int],
        pieces: tuple[Tile, ...] = (),
    ) -> str | None:
        """See `Plane`."""
        order = link_pb2.KvCopyOut(
            ticket=ticket, partition=partition, cells=cells, checksums=checksums, pieces=map(tile_message, pieces)
        )
        work = self._own.copy_out(ticket, partition, cells, checksums, pieces)
        own, answers = await self._all(link_pb2.GangOrder(copy_out=order), work)
        if isinstance(own, BaseException):
            raise own
        faults = [answer.mismatch.detail for answer in answers if answer.HasField("mismatch")]
        if own is None and not faults:
            self.num_landed_blocks += len(cells)
            return None
        self.num_mismatches += 1
        self._own.drop(ticket)
        self._drop(ticket)
        return own or faults[0]

    def take(self, ticket: int) -> np.ndarray:
        """See `Plane`: the leader's part. Followers take theirs as the land comes to them."""
        return self._own.take(ticket)

    def drop(self, ticket: int) -> bool:
        """See `Plane`."""
        was_there = self._own.drop(ticket)
        if was_there:
            self._drop(ticket)
        return was_there

    def clear(self, partition: int, cells: Sequence[int]) -> None:
        """See `Plane`."""
        self._own.clear(partition, cells)
        self._orders.tell(link_pb2.GangOrder(clear=link_pb2.KvClear(partition=partition, cells=cells)))

    def close(self) -> None:
        """Of the leader: the followers end with their processes."""
        self._own.close()

    async def _all[T](
        self, order: link_pb2.GangOrder, own: Coroutine[Any, Any, T]
    ) -> tuple[T | BaseException, Answers]:
        """What all members made of it, once the last one has ended."""
        asked = self._orders.ask(order)
        result, answers = await asyncio.gather(own, asked, return_exceptions=True)
        if isinstance(answers, BaseException):
            raise answers
        return result, answers

    def _published(self, answer: link_pb2.FollowerAnswer) -> PublishResult | TransferFailed:
        if answer.HasField("published"):
            told = answer.published
            result = PublishResult(
                num_bytes=told.num_bytes, num_transfers=told.num_transfers, duration_s=told.duration_s
            )
            self._meter.add(result)
            return result
        cause = FailureCause(answer.unpublished.cause)
        self._meter.add_failure(cause, 0.0)
        return TransferFailed(cause, answer.unpublished.detail, may_still_land=answer.unpublished.may_still_land)

    def _drop(self, ticket: int) -> None:
        self._orders.tell(link_pb2.GangOrder(drop=link_pb2.KvDrop(ticket=ticket)))


def _joined(own: Endpoint, members: Sequence[link_pb2.FollowerReady], num_partitions: int) -> Endpoint:
    """One endpoint with the regions of all members."""
    regions, sessions = dict(own.regions), dict(own.sessions)
    for member in members:
        theirs = regions_from(member.regions)
        if twice := regions.keys() & theirs.keys():
            raise GangFault(f"two members of the gang have the KV of {min(twice)}")
        regions |= theirs
        sessions |= dict.fromkeys(theirs, member.session)
    owners = [shard.owner for shard in own.layout.groups[0].shards]
    if missing := {Place(p, owner) for p in range(num_partitions) for owner in owners} - regions.keys():
        raise GangFault(f"no member of the gang has the KV of {min(missing)}")
    return replace(own, regions=regions, sessions=sessions)
