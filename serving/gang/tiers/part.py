"""A follower's tiers, as its leader orders: it answers with names, and what its steps export and land is here."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import numpy as np

from moonshard.kv.prefix import BlockName, split_names
from moonshard.rpc import link_pb2
from moonshard.serving.gang.part import Exported, Landing
from moonshard.serving.gang.steps import GangDiverged
from moonshard.serving.wire.tiers import chain_message, names_message, piece_from, run_message, tier_message
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.store.places import Came, TierBlocks
from moonshard.serving.worker.store.threads import Asked

MAX_HELD_AT_ONCE = 4096  # names of each tier in an answer

Answer = Callable[[link_pb2.TierAnswer], None]


class TierPart:
    """On the event loop. `partitions`: whose blocks are here. `fail` is told of whatever is no tier's fault."""

    def __init__(
        self, blocks: TierBlocks, partitions: Collection[int], answer: Answer, fail: Callable[[BaseException], None]
    ):
        self._blocks = blocks
        self._partitions = frozenset(partitions)
        self._answer = answer
        self._exported = Exported()
        self._landing = Landing()
        self._held = dict[str, list[BlockName]]()  # until it is told
        self._fetching = dict[int, Asked[Came]]()  # by ticket
        self._num_orders = 0
        self._background = Background(fail)

    def __len__(self) -> int:
        """How many blocks' bytes are on their way here, as tickets."""
        return len(self._blocks) + len(self._landing) + len(self._exported)

    @property
    def message(self) -> list[link_pb2.KvTier]:
        """The tiers as they are now."""
        return [tier_message(name, counters) for name, counters in self._blocks.stack.counters.items()]

    # ---- what the steps leave, and take

    def exported(self, ticket: int, partition: int, pages: np.ndarray) -> None:
        """An export of the ticket has read this."""
        if partition in self._partitions:
            self._exported.add(ticket, pages)

    def payload(self, ticket: int, partition: int, num_blocks: int) -> np.ndarray:
        """What the next land of the ticket writes; of other members' partitions nothing, in so many blocks.

        GangDiverged where nothing came for one of ours.
        """
        if partition not in self._partitions:
            return self._blocks.no_layers(num_blocks)
        if self._landing.left(ticket) < num_blocks:
            raise GangDiverged(f"{num_blocks} blocks are to land in partition {partition} that did not come")
        return self._landing.take(ticket, num_blocks)

    # ---- orders

    def obey(self, order: link_pb2.TierOrder) -> None:
        """GangDiverged where it is not the next one."""
        if order.number != self._num_orders:
            raise GangDiverged(f"order {order.number} for tiers came where {self._num_orders} was to come")
        self._num_orders += 1
        match order.WhichOneof("what"):
            case "find":
                self._begin(order.number, self._find(split_names(order.find.names)))
            case "fetch":
                ticket, chain = order.fetch.ticket, split_names(order.fetch.names)
                self._fetching[ticket] = self._blocks.fetch(ticket, chain, order.fetch.tiers)
                self._begin(order.number, self._tell_what_came(ticket))
            case "give_up":
                if (asked := self._fetching.get(order.give_up.ticket)) is not None:
                    asked.give_up()
            case "land":
                land = order.land
                self._landing.put(land.ticket, self._blocks.take(land.ticket, land.first)[: land.num_blocks])
            case "forget":
                self._blocks.drop(order.forget.ticket)
            case "lacking":
                self._begin(order.number, self._lacking(order.lacking))
            case "renew":
                self._begin(order.number, self._renew(split_names(order.renew.names)))
            case "keep":
                self._begin(order.number, self._keep(order.keep))
            case "held":
                self._begin(order.number, self._tell_held(order.held.first))
            case "upkeep":
                self._blocks.upkeep()
            case unknown:
                raise GangDiverged(f"order {order.number} for tiers is {unknown}")

    def close(self) -> None:
        """Blocks."""
        self._blocks.threads.close()
        self._blocks.stack.close()

    def _begin(self, number: int, work: Coroutine[Any, Any, link_pb2.TierAnswer]) -> None:
        async def answered() -> None:
            answer = await work
            answer.number = number
            self._answer(answer)

        self._background.spawn(answered())

    async def _find(self, chain: list[BlockName]) -> link_pb2.TierAnswer:
        found = await self._blocks.find(chain).future
        return link_pb2.TierAnswer(found=link_pb2.TierFound(tiers=[tier or "" for tier in found]))

    async def _tell_what_came(self, ticket: int) -> link_pb2.TierAnswer:
        """Nothing, where it was given up before it began."""
        asked = self._fetching[ticket]
        await asyncio.wait([asked.future])
        del self._fetching[ticket]
        told = link_pb2.TierCame()
        if not asked.future.cancelled():
            came = asked.future.result()
            told = link_pb2.TierCame(num_blocks=len(came.names), runs=map(run_message, came.runs))
        return link_pb2.TierAnswer(came=told)

    async def _lacking(self, lacking: link_pb2.TierLacking) -> link_pb2.TierAnswer:
        only = lacking.only if lacking.HasField("only") else None
        names = await self._blocks.lacking(list(map(split_names, lacking.chains)), only)
        return link_pb2.TierAnswer(lacking=chain_message(sorted(names)))

    async def _renew(self, chain: list[BlockName]) -> link_pb2.TierAnswer:
        return link_pb2.TierAnswer(names=names_message(await self._blocks.renew(chain)))

    async def _keep(self, keep: link_pb2.TierPiece) -> link_pb2.TierAnswer:
        piece = piece_from(keep)
        if piece.partition not in self._partitions:
            raise GangDiverged(f"blocks of partition {piece.partition} are to be kept where they are not")
        pages = await self._exported.all_of(keep.ticket, len(piece.names))
        return link_pb2.TierAnswer(names=names_message(await self._blocks.keep(piece, pages)))

    async def _tell_held(self, first: int) -> link_pb2.TierAnswer:
        if not first:
            self._held = self._blocks.stack.held()
        part = {tier: names[first : first + MAX_HELD_AT_ONCE] for tier, names in self._held.items()}
        if not any(part.values()):
            self._held.clear()
        return link_pb2.TierAnswer(names=names_message(part))
