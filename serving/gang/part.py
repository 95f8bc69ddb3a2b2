"""A follower's part in its gang's handoffs: what its leader orders of its own plane, and what its steps leave for it.

Orders are begun as they come, and those that take a while go on beside what comes next. The leader orders nothing of
the same cells before it has been answered.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from moonshard.kv.transfer import TransferFailed
from moonshard.rpc import link_pb2
from moonshard.serving.gang.steps import GangDiverged
from moonshard.serving.transfer.endpoint import endpoint_from, region_messages
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.wire.tiles import tile_from
from moonshard.serving.worker.background import Background

Answer = Callable[[link_pb2.FollowerAnswer], None]


class Exported:
    """What the exports of tickets have read, until somebody takes it. On the event loop."""

    def __init__(self) -> None:
        self._parts: dict[int, list[np.ndarray]] = {}  # by ticket
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Of how many tickets."""
        return len(self._parts)

    def add(self, ticket: int, pages: np.ndarray) -> None:
        """An export of the ticket has read this."""
        self._parts.setdefault(ticket, []).append(pages)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def all_of(self, ticket: int, num_blocks: int) -> np.ndarray:
        """All that exports of the ticket read, once they have: the leader's may be done sooner."""
        while sum(map(len, self._parts.get(ticket, ()))) < num_blocks:
            await self._news.wait()
        parts = self._parts.pop(ticket)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Landing:
    """What the lands of tickets have not taken yet: one may take several steps."""

    def __init__(self) -> None:
        self._pages: dict[int, np.ndarray] = {}  # by ticket

    def __len__(self) -> int:
        """Of how many tickets."""
        return len(self._pages)

    def left(self, ticket: int) -> int:
        """How many blocks."""
        return len(self._pages.get(ticket, ()))

    def put(self, ticket: int, pages: np.ndarray) -> None:
        self._pages[ticket] = pages

    def take(self, ticket: int, num_blocks: int) -> np.ndarray:
        """The next of them. KeyError where there are none."""
        pages = self._pages.pop(ticket)
        if len(pages) > num_blocks:
            self._pages[ticket] = pages[num_blocks:]
        return pages[:num_blocks]


class PlanePart:
    """On the event loop. `fail` is told of what is no failed transfer and no mismatch."""

    def __init__(self, plane: KvPlane, answer: Answer, fail: Callable[[BaseException], None]):
        self._plane = plane
        self._answer = answer
        self._num_orders = 0
        self._exported = Exported()  # until it is staged
        self._landing = Landing()
        self._background = Background(fail)

    # ---- what the steps leave, and take

    def exported(self, ticket: int, pages: np.ndarray) -> None:
        """An export of the ticket has read this."""
        self._exported.add(ticket, pages)

    def payload(self, ticket: int, num_blocks: int) -> np.ndarray:
        """What the next land of the ticket writes. KeyError where it was not copied out."""
        if not self._landing.left(ticket):
            self._landing.put(ticket, self._plane.take(ticket))
        return self._landing.take(ticket, num_blocks)

    # ---- orders

    def obey(self, order: link_pb2.GangOrder) -> None:
        """GangDiverged where it is not the next one."""
        if order.number != self._num_orders:
            raise GangDiverged(f"order {order.number} came where {self._num_orders} was to come")
        self._num_orders += 1
        match order.WhichOneof("what"):
            case "stage":
                self._begin(order.number, self._stage(order.stage))
            case "publish":
                self._begin(order.number, self._publish(order.publish))
            case "copy_out":
                self._begin(order.number, self._copy_out(order.copy_out))
            case "clear":
                self._plane.clear(order.clear.partition, order.clear.cells)
            case "drop":
                self._plane.drop(order.drop.ticket)
            case unknown:
                raise GangDiverged(f"order {order.number} is {unknown}")

    def _begin(self, number: int, work: Coroutine[Any, Any, link_pb2.FollowerAnswer]) -> None:
        async def answered() -> None:
            answer = await work
            answer.number = number
            self._answer(answer)

        self._background.spawn(answered())

    async def _stage(self, stage: link_pb2.KvStage) -> link_pb2.FollowerAnswer:
        pages = await self._exported.all_of(stage.ticket, len(stage.cells))
        pieces = tuple(map(tile_from, stage.pieces))
        sums = await self._plane.stage(stage.ticket, stage.partition, stage.cells, pages, pieces)
        return link_pb2.FollowerAnswer(staged=link_pb2.KvStaged(checksums=sums))

    async def _publish(self, publish: link_pb2.KvPublish) -> link_pb2.FollowerAnswer:
        to = endpoint_from(publish.endpoint)
        try:
            result = await self._plane.publish(
                publish.partition, publish.cells, to, publish.to_partition, publish.to_cells
            )
        except TransferFailed as failure:
            told = link_pb2.KvUnpublished(
                cause=failure.cause, detail=str(failure), may_still_land=failure.may_still_land
            )
            return link_pb2.FollowerAnswer(unpublished=told)
        done = link_pb2.KvPublished(
            num_bytes=result.num_bytes, num_transfers=result.num_transfers, duration_s=result.duration_s
        )
        return link_pb2.FollowerAnswer(published=done)

    async def _copy_out(self, copy: link_pb2.KvCopyOut) -> link_pb2.FollowerAnswer:
        pieces = tuple(map(tile_from, copy.pieces))
        fault = await self._plane.copy_out(copy.ticket, copy.partition, copy.cells, copy.checksums, pieces)
        if fault is not None:
            return link_pb2.FollowerAnswer(mismatch=link_pb2.KvMismatch(detail=fault))
        return link_pb2.FollowerAnswer(copied=link_pb2.KvCopied())


def ready_message(
    plane: KvPlane | None, tiers: Mapping[str, bool] | None = None, loaded_as: Mapping[str, str] | None = None
) -> link_pb2.FollowerReady:
    """What a follower says of its plane, where its gang hands KV over, of its tiers: which are shared, and of what
    all have to have loaded alike.
    """
    kinds = [link_pb2.TierKind(name=name, is_shared=is_shared) for name, is_shared in (tiers or {}).items()]
    if plane is None:
        return link_pb2.FollowerReady(tiers=kinds, loaded_as=loaded_as)
    regions = region_messages(plane.endpoint)
    return link_pb2.FollowerReady(session=plane.endpoint.session, regions=regions, tiers=kinds, loaded_as=loaded_as)
