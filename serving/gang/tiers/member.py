"""A follower's tiers as the leader sees them. Needs jax."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from moonshard.kv.prefix import BlockName, split_names
from moonshard.kv.store.tier import TierCounters
from moonshard.rpc import link_pb2
from moonshard.serving.control.tiers.piece import Piece
from moonshard.serving.engine.engine import Engine
from moonshard.serving.gang.tiers.orders import TierOrders
from moonshard.serving.wire.tiers import chain_message, counters_from, names_from, piece_message, run_from
from moonshard.serving.worker.store.places import Came, no_layers
from moonshard.serving.worker.store.threads import Asked, Pending
from moonshard.sharding.layout import BlockShape


class MemberTiers:
    """The place of a follower's partitions. See `Place`.

    `tiers`: what it says it has; `told`: how it said they are, last. `block`: as all members cut it. `tickets`: no two
    are alike in a worker.
    """

    def __init__(
        self,
        engine: Engine,
        orders: TierOrders,
        tiers: Sequence[link_pb2.TierKind],
        *,
        told: Callable[[], Sequence[link_pb2.KvTier]],
        block: BlockShape,
        tickets: Iterator[int],
    ):
        self._engine = engine
        self._orders = orders
        self._told = told
        self._block = block
        self._tickets = tickets
        self._pending = Pending()
        self._is_stopped = False
        self.shared: Mapping[str, bool] = {tier.name: tier.is_shared for tier in tiers}

    @property
    def counters(self) -> Mapping[str, TierCounters]:
        return {tier.name: counters_from(tier) for tier in self._told()}

    @property
    def is_full(self) -> bool:
        return self._is_stopped or not self.shared or self._pending.is_full

    def find(self, chain: Sequence[BlockName]) -> Asked[list[str | None]]:
        async def found() -> list[str | None]:
            return [tier or None for tier in (await answer).found.tiers]

        answer = self._orders.ask(link_pb2.TierOrder(find=chain_message(chain)))
        return self._pending.look_up(Asked(_begun(found()), lambda: False))

    def fetch(self, chain: Sequence[BlockName], tiers: Sequence[str]) -> Asked[Came]:
        ticket = next(self._tickets)

        async def came() -> Came:
            told = (await answer).came
            runs = tuple(map(run_from, told.runs))
            return Came(ticket=ticket, names=tuple(chain[: told.num_blocks]), runs=runs)

        fetch = link_pb2.TierFetch(ticket=ticket, names=b"".join(chain), tiers=tiers)

        def give_up() -> bool:
            """Whether it had begun is not known here: what comes is noted, and it may be nothing."""
            self._orders.tell(link_pb2.TierOrder(give_up=link_pb2.TierForget(ticket=ticket)))
            return False

        answer = self._orders.ask(link_pb2.TierOrder(fetch=fetch))
        return self._pending.ask(Asked(_begun(came()), give_up))

    def land(self, partition: int, blocks: Sequence[int], came: Came, first: int) -> None:
        nothing = no_layers(self._block, len(blocks))
        land = link_pb2.TierLand(ticket=came.ticket, first=first, num_blocks=len(blocks))
        self._orders.tell(link_pb2.TierOrder(land=land))  # before the steps that take it
        self._engine.land(partition, blocks, nothing, lambda: None, ticket=came.ticket)

    def drop(self, came: Came) -> None:
        self._orders.tell(link_pb2.TierOrder(forget=link_pb2.TierForget(ticket=came.ticket)))

    async def lacking(self, chains: Sequence[Sequence[BlockName]], only: str | None) -> set[BlockName]:
        lacking = link_pb2.TierLacking(chains=map(b"".join, chains), only=only)
        return set(split_names((await self._orders.ask(link_pb2.TierOrder(lacking=lacking))).lacking.names))

    async def renew(self, chain: Sequence[BlockName]) -> dict[str, list[BlockName]]:
        return names_from((await self._orders.ask(link_pb2.TierOrder(renew=chain_message(chain)))).names)

    def keep(self, piece: Piece, blocks: Sequence[int]) -> Awaitable[dict[str, list[BlockName]]]:
        ticket = next(self._tickets)
        self._engine.export(piece.partition, blocks, lambda _: None, ticket=ticket)
        return self._keep(self._orders.ask(link_pb2.TierOrder(keep=piece_message(ticket, piece))))

    async def held(self) -> AsyncIterator[dict[str, list[BlockName]]]:
        num_told = 0
        while True:
            order = link_pb2.TierOrder(held=link_pb2.TierHeld(first=num_told))
            part = names_from((await self._orders.ask(order)).names)
            if not any(part.values()):
                return
            yield part
            num_told += max(map(len, part.values()))

    def upkeep(self) -> None:
        self._orders.tell(link_pb2.TierOrder(upkeep=link_pb2.TierUpkeep()))

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        """The member closes its tiers as the gang ends."""

    async def _keep(self, answer: "asyncio.Future[link_pb2.TierAnswer]") -> dict[str, list[BlockName]]:
        return names_from((await answer).names)


def _begun[T](answering: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().create_task(answering)
