"""Where a partition's blocks are below the device's pages: its tiers, and the ways between them and the pages.

A worker of one process has one place for all its partitions. In a gang each member has a place of its own, for the
partitions that its devices are (`serving.gang.tiers`): bytes go from a member's tiers into its own pages and back, and
the leader, which decides, hears of names alone. So what a fetch has read stays where it is, by a ticket, until it is
landed or dropped.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.stack import Fetched, FetchedRun, TierStack
from moonshard.kv.store.tier import TierCounters
from moonshard.serving.control.tiers.piece import Piece
from moonshard.serving.engine.engine import Engine
from moonshard.serving.worker.store.threads import Asked, TierThreads
from moonshard.sharding.layout import BlockShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Came:
    """The first blocks that were asked for, up to the first that did not come. They wait under their ticket."""

    ticket: int
    names: tuple[BlockName, ...]
    runs: tuple[FetchedRun, ...]


class Place(Protocol):
    """On the event loop. Nothing here raises what a tier, a disk or a network did."""

    @property
    def shared(self) -> Mapping[str, bool]:
        """Of each tier, the nearest first, whether every worker finds there what any has kept."""
        ...

    @property
    def counters(self) -> Mapping[str, TierCounters]: ...

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be asked for a request: too much waits already, or it seems to hang."""
        ...

    def find(self, chain: Sequence[BlockName]) -> Asked[list[str | None]]:
        """See `TierStack`. Nobody need wait for it: who is late to hear may still use it."""
        ...

    def fetch(self, chain: Sequence[BlockName], tiers: Sequence[str]) -> Asked[Came]:
        """See `TierStack`. What comes is to be landed or dropped."""
        ...

    def land(self, partition: int, blocks: Sequence[int], came: Came, first: int) -> None:
        """Overwrites blocks with what came, from the `first` of its names on, before all that is launched later. The
        nearer tiers are given what came.
        """
        ...

    def drop(self, came: Came) -> None:
        """It is not landed."""
        ...

    async def lacking(self, chains: Sequence[Sequence[BlockName]], only: str | None) -> set[BlockName]:
        """See `TierStack`."""
        ...

    async def renew(self, chain: Sequence[BlockName]) -> dict[str, list[BlockName]]:
        """See `TierStack`."""
        ...

    def keep(self, piece: Piece, blocks: Sequence[int]) -> Awaitable[dict[str, list[BlockName]]]:
        """Reads these blocks now, behind all that was launched, and has the tiers keep them: what each has now."""
        ...

    def held(self) -> AsyncIterator[dict[str, list[BlockName]]]:
        """What each tier has from the beginning, some at a time."""
        ...

    def upkeep(self) -> None:
        """What has to be done now and then, and nobody waits for."""
        ...

    def stop(self) -> None:
        """Nothing more is begun."""
        ...

    def close(self) -> None:
        """Blocks. After `stop`."""
        ...


PlacesOf = Callable[[Engine], Sequence[Place]]  # one for each partition; those of one process are one


class TierBlocks:
    """Tiers behind their threads, and blocks that came from them. On the event loop."""

    def __init__(self, stack: TierStack, block: BlockShape, threads: TierThreads | None = None):
        self.stack = stack
        self.threads = threads or TierThreads()
        self._block = block
        self._fetched = dict[int, Fetched]()

    def __len__(self) -> int:
        """How many fetches have come, and are neither landed nor dropped."""
        return len(self._fetched)

    @property
    def shared(self) -> Mapping[str, bool]:
        return {tier: self.stack.is_shared(tier) for tier in self.stack.names}

    def find(self, chain: Sequence[BlockName]) -> Asked[list[str | None]]:
        return self.threads.look_up(self.stack.find, chain)

    def fetch(self, ticket: int, chain: Sequence[BlockName], tiers: Sequence[str]) -> Asked[Came]:
        return self.threads.ask(self._fetch, ticket, chain, tiers)

    def take(self, ticket: int, first: int) -> np.ndarray:
        """What came under the ticket, from the `first` block on, as `Engine.land` takes it; nearer tiers are given all
        of it. KeyError where nothing did.
        """
        fetched = self._fetched.pop(ticket)
        self.threads.write_behind(lambda: self.stack.promote(fetched))
        rows, block = fetched.blocks[first:], self._block
        shape = (len(rows), block.num_layers, block.block_size, block.num_features)
        return rows.view(jnp.dtype(block.dtype)).reshape(shape)

    def no_layers(self, num_blocks: int) -> np.ndarray:
        """What `Engine.land` takes of blocks that other processes' devices have."""
        return no_layers(self._block, num_blocks)

    def drop(self, ticket: int) -> None:
        """What came under the ticket, if anything did."""
        self._fetched.pop(ticket, None)

    async def lacking(self, chains: Sequence[Sequence[BlockName]], only: str | None) -> set[BlockName]:
        return await self.threads.write(self.stack.lacking, chains, only)

    async def renew(self, chain: Sequence[BlockName]) -> dict[str, list[BlockName]]:
        return await self.threads.write(self.stack.renew, chain)

    async def keep(self, piece: Piece, pages: np.ndarray) -> dict[str, list[BlockName]]:
        """`pages` as `Engine.export` gives them."""
        rows = np.ascontiguousarray(pages).reshape(len(piece.names), -1).view(np.uint8)
        return await self.threads.write(self.stack.keep, _chains(piece, rows), piece.again_for)

    def upkeep(self) -> None:
        self.threads.write_behind(self.stack.upkeep)

    def _fetch(self, ticket: int, chain: Sequence[BlockName], tiers: Sequence[str]) -> Came:
        fetched = self._fetched[ticket] = self.stack.fetch(chain, tiers)
        return Came(ticket=ticket, names=fetched.names, runs=fetched.runs)


class OwnTiers:
    """The place of this process's partitions. See `Place`."""

    def __init__(self, engine: Engine, blocks: TierBlocks, tickets: Iterator[int]):
        """`tickets`: no two are alike in a worker."""
        self._engine = engine
        self._blocks = blocks
        self._tickets = tickets

    @property
    def shared(self) -> Mapping[str, bool]:
        return self._blocks.shared

    @property
    def counters(self) -> Mapping[str, TierCounters]:
        return self._blocks.stack.counters

    @property
    def is_full(self) -> bool:
        return not self._blocks.shared or self._blocks.threads.is_full

    def find(self, chain: Sequence[BlockName]) -> Asked[list[str | None]]:
        return self._blocks.find(chain)

    def fetch(self, chain: Sequence[BlockName], tiers: Sequence[str]) -> Asked[Came]:
        return self._blocks.fetch(next(self._tickets), chain, tiers)

    def land(self, partition: int, blocks: Sequence[int], came: Came, first: int) -> None:
        pages = self._blocks.take(came.ticket, first)[: len(blocks)]
        self._engine.land(partition, blocks, pages, lambda: None, ticket=came.ticket)

    def drop(self, came: Came) -> None:
        self._blocks.drop(came.ticket)

    async def lacking(self, chains: Sequence[Sequence[BlockName]], only: str | None) -> set[BlockName]:
        return await self._blocks.lacking(chains, only)

    async def renew(self, chain: Sequence[BlockName]) -> dict[str, list[BlockName]]:
        return await self._blocks.renew(chain)

    def keep(self, piece: Piece, blocks: Sequence[int]) -> Awaitable[dict[str, list[BlockName]]]:
        read: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._engine.export(piece.partition, blocks, read.set_result, ticket=next(self._tickets))
        return self._keep(piece, read)

    async def held(self) -> AsyncIterator[dict[str, list[BlockName]]]:
        yield self._blocks.stack.held()

    def upkeep(self) -> None:
        self._blocks.upkeep()

    def stop(self) -> None:
        self._blocks.threads.close()

    def close(self) -> None:
        self._blocks.stack.close()

    async def _keep(self, piece: Piece, read: "asyncio.Future[np.ndarray]") -> dict[str, list[BlockName]]:
        return await self._blocks.keep(piece, await read)


def alone(stack: TierStack, block: BlockShape, num_partitions: int) -> PlacesOf:
    """The places of a worker of one process."""

    def places(engine: Engine) -> Sequence[Place]:
        return [OwnTiers(engine, TierBlocks(stack, block), itertools.count())] * num_partitions

    return places


def no_layers(block: BlockShape, num_blocks: int) -> np.ndarray:
    """What `Engine.land` takes of blocks that other processes' devices have."""
    return np.empty((num_blocks, 0, block.block_size, block.num_features), jnp.dtype(block.dtype))


def _chains(piece: Piece, rows: Bytes) -> Iterable[tuple[BlockName | None, Sequence[BlockName], Bytes]]:
    """As `TierStack.keep` takes them."""
    return [(piece.parents[chain.start], piece.names[chain], rows[chain]) for chain in piece.chains()]
