"""The processes of a worker as a schedule has them: each with its tiers, its threads, and what it was told.

What the leader tells a follower arrives at once, since devices run at once what they are told; what a follower answers,
and what its exports have read, arrives when the schedule says so.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from moonshard.kv.store.stack import TierStack
from moonshard.rpc import link_pb2
from moonshard.serving.engine.engine import Engine
from moonshard.serving.gang.tiers.member import MemberTiers
from moonshard.serving.gang.tiers.orders import TierOrders
from moonshard.serving.gang.tiers.part import TierPart
from moonshard.serving.worker.store.places import OwnTiers, Place, TierBlocks
from moonshard.serving.worker.store.threads import Asked
from moonshard.sharding.layout import BlockShape
from tests.kv.store.kept_tier import KeptTier

MAX_PENDING = 5


class ScriptedThreads:
    """Runs what it was given when it is told to. What is given up before is never run."""

    def __init__(self) -> None:
        self.pending: list[tuple[Future[Any], Callable[[], Any]]] = []

    @property
    def is_full(self) -> bool:
        return len(self.pending) >= MAX_PENDING

    def ask(self, work: Callable[..., Any], *arguments: object) -> Asked[Any]:
        running = self._add(work, *arguments)
        return Asked(asyncio.wrap_future(running), running.cancel)

    look_up = ask

    async def write(self, work: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.wrap_future(self._add(work, *arguments))

    def write_behind(self, work: Callable[[], None]) -> None:
        self._add(work)

    def _add(self, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        running = Future[Any]()
        self.pending.append((running, lambda: work(*arguments)))
        return running

    def run(self, index: int) -> None:
        running, work = self.pending.pop(index)
        if running.set_running_or_notify_cancel():
            running.set_result(work())


class Process:
    """One of them, by itself: its tiers, and blocks on their way between these and its devices."""

    def __init__(self, block: BlockShape) -> None:
        block_bytes = block.num_layers * block.block_size * block.num_features * block.itemsize_bytes
        self.tiers = [KeptTier(block_bytes, name, is_shared=False) for name in ("host", "ssd")]
        self.stack = TierStack(self.tiers)
        self.threads = ScriptedThreads()
        self.blocks = TierBlocks(self.stack, block, self.threads)  # pyright: ignore[reportArgumentType]
        self.coming: deque[Callable[[], None]] = deque()  # what is to arrive from it, in this order

    @property
    def num_held(self) -> int:
        return len(self.blocks)

    def exported(self, ticket: int, partition: int, pages: np.ndarray) -> None:
        """Of the leader this comes with the engine's step."""

    def landed(self, ticket: int, partition: int, payload: np.ndarray) -> np.ndarray:
        return payload


class FollowingProcess(Process):
    def __init__(self, block: BlockShape, member: int, partitions: range, fail: Callable[[BaseException], None]):
        super().__init__(block)
        self.orders = TierOrders(member, self._tell)
        self._part = TierPart(self.blocks, partitions, self._answer, fail)

    @property
    def num_held(self) -> int:
        return len(self._part)

    def exported(self, ticket: int, partition: int, pages: np.ndarray) -> None:
        self.coming.append(lambda: self._part.exported(ticket, partition, pages))

    def landed(self, ticket: int, partition: int, payload: np.ndarray) -> np.ndarray:
        assert payload.size == 0
        return self._part.payload(ticket, partition, len(payload))

    def place(self, engine: Engine, block: BlockShape, tickets: Iterator[int]) -> MemberTiers:
        kinds = [link_pb2.TierKind(name=tier.name, is_shared=tier.is_shared) for tier in self.tiers]
        return MemberTiers(engine, self.orders, kinds, told=self._told, block=block, tickets=tickets)

    def _told(self) -> Sequence[link_pb2.KvTier]:
        return self._part.message

    def _tell(self, order: link_pb2.TierOrder) -> None:
        self._part.obey(link_pb2.TierOrder.FromString(order.SerializeToString()))

    def _answer(self, answer: link_pb2.TierAnswer) -> None:
        encoded = answer.SerializeToString()
        self.coming.append(lambda: self.orders.answered(link_pb2.TierAnswer.FromString(encoded)))


def places_of(processes: Sequence[Process], engine: Engine, block: BlockShape, tickets: Iterator[int]) -> list[Place]:
    """Of each process."""
    return [
        each.place(engine, block, tickets)
        if isinstance(each, FollowingProcess)
        else OwnTiers(engine, each.blocks, tickets)
        for each in processes
    ]
