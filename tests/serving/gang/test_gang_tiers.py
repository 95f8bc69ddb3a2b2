"""A follower's tiers, asked by its leader: as its own would be, and no byte crosses from one to the other."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from moonshard.kv.prefix import BlockName, block_names
from moonshard.kv.store.host import HostTier
from moonshard.kv.store.stack import TierStack
from moonshard.kv.store.tier import MissCause, TierCounters
from moonshard.rpc import link_pb2
from moonshard.serving.control.tiers.piece import Piece
from moonshard.serving.gang.members import GangFault
from moonshard.serving.gang.steps import GangDiverged
from moonshard.serving.gang.tickets import is_of_tiers, tier_tickets
from moonshard.serving.gang.tiers import part as tier_part
from moonshard.serving.gang.tiers.member import MemberTiers
from moonshard.serving.gang.tiers.orders import TierOrders
from moonshard.serving.gang.tiers.part import TierPart
from moonshard.serving.wire.tiers import counters_from, piece_from, piece_message, tier_message
from moonshard.serving.worker.store import threads
from moonshard.serving.worker.store.places import TierBlocks
from tests.kv.store.kept_tier import KeptTier
from tests.serving.gang.planes import BLOCK

pytestmark = pytest.mark.timeout(60)
THEIRS, OURS = 2, 0  # partitions: of the follower, of the leader
PIECE_BLOCKS = 2  # that a step exports or lands
BLOCK_BYTES = BLOCK.num_layers * BLOCK.block_size * BLOCK.num_features * BLOCK.itemsize_bytes
NAMES = block_names(b"root", range(7 * BLOCK.block_size), BLOCK.block_size)


@dataclass
class Member:
    """A follower and its leader's view of it. Steps run on it as they are told, `PIECE_BLOCKS` at a time."""

    stack: TierStack
    pages: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)  # of its devices
    faults: list[BaseException] = field(default_factory=list)
    has_failed: asyncio.Event = field(default_factory=asyncio.Event)
    is_silent: bool = False

    def __post_init__(self) -> None:
        self.blocks = TierBlocks(self.stack, BLOCK)
        self.orders = TierOrders(1, self._tell)
        self.part = TierPart(self.blocks, {THEIRS, THEIRS + 1}, self._answer, self._fail)
        kinds = [link_pb2.TierKind(name=name, is_shared=is_shared) for name, is_shared in self.blocks.shared.items()]
        engine: Any = self
        self.tiers = MemberTiers(
            engine, self.orders, kinds, told=lambda: self.part.message, block=BLOCK, tickets=tier_tickets()
        )

    def _tell(self, order: link_pb2.TierOrder) -> None:
        if not self.is_silent:
            self.part.obey(link_pb2.TierOrder.FromString(order.SerializeToString()))

    def _answer(self, answer: link_pb2.TierAnswer) -> None:
        self.orders.answered(link_pb2.TierAnswer.FromString(answer.SerializeToString()))

    def _fail(self, error: BaseException) -> None:
        self.faults.append(error)
        for waiting in self.orders._asked.values():
            waiting.set_exception(error)
        self.has_failed.set()

    # ---- as the leader's engine

    def export(self, partition: int, blocks: Sequence[int], on_done: Any, ticket: int) -> None:
        assert is_of_tiers(ticket)
        for start in range(0, len(blocks), PIECE_BLOCKS):
            read = np.stack([self.pages[partition, block] for block in blocks[start : start + PIECE_BLOCKS]])
            asyncio.get_running_loop().call_soon(self.part.exported, ticket, partition, read)

    def land(self, partition: int, blocks: Sequence[int], payload: np.ndarray, on_done: Any, ticket: int) -> None:
        assert payload.shape == (len(blocks), 0, BLOCK.block_size, BLOCK.num_features)
        for start in range(0, len(blocks), PIECE_BLOCKS):
            written = blocks[start : start + PIECE_BLOCKS]
            pages = self.part.payload(ticket, partition, len(written))
            self.pages |= {(partition, block): page for block, page in zip(written, pages, strict=True)}

    # ---- what tests do with it

    def fill(self, blocks: Sequence[int]) -> np.ndarray:
        shape = (len(blocks), BLOCK.num_layers, BLOCK.block_size, BLOCK.num_features)
        pages = np.random.default_rng(len(blocks)).standard_normal(shape, np.float32)
        self.pages |= {(THEIRS, block): page for block, page in zip(blocks, pages, strict=True)}
        return pages

    async def keep(self, names: Sequence[BlockName], parent: BlockName | None = None, **fields: Any) -> Any:
        """Of the device's blocks from 0 on."""
        piece = Piece(partition=THEIRS, names=tuple(names), parents=(parent, *names[:-1]), **fields)
        return await self.tiers.keep(piece, range(len(names)))


def host() -> HostTier:
    return HostTier(block_bytes=BLOCK_BYTES, max_bytes=100 * BLOCK_BYTES)


@asynccontextmanager
async def a_member(*tiers: Any) -> AsyncIterator[Member]:
    member = Member(TierStack(tiers))
    try:
        yield member
    finally:
        member.part.close()
    assert not member.faults
    assert not len(member.part)


@pytest.mark.parametrize("first", range(6))
async def test_what_was_kept_lands_again_from_the_first_that_is_wanted_on(first: int):
    async with a_member(host()) as member:
        pages = member.fill(range(6))
        assert await member.keep(NAMES[:6]) == {"host": NAMES[:6]}
        assert await member.tiers.find(NAMES).future == ["host"] * 6 + [None]
        came = await member.tiers.fetch(NAMES, ["host"] * 7).future
        assert came.names == tuple(NAMES[:6])
        assert [(run.tier, run.num_asked, run.num_blocks) for run in came.runs] == [("host", 7, 6)]
        landed = range(10 + first, 16)
        member.tiers.land(THEIRS, landed, came, first)
        for block, page in zip(landed, pages[first:], strict=True):
            np.testing.assert_array_equal(member.pages[THEIRS, block], page)


async def test_fewer_blocks_may_land_than_came():
    async with a_member(host()) as member:
        pages = member.fill(range(6))
        await member.keep(NAMES[:6])
        came = await member.tiers.fetch(NAMES[:6], ["host"] * 6).future
        member.tiers.land(THEIRS, [10, 11, 12], came, 1)
        np.testing.assert_array_equal(member.pages[THEIRS, 12], pages[3])


async def test_what_is_not_wanted_any_more_is_not_held():
    async with a_member(host()) as member:
        member.fill(range(3))
        await member.keep(NAMES[:3])
        came = [await member.tiers.fetch(NAMES[:3], ["host"] * 3).future for _ in range(2)]
        assert len(member.part) == 2
        for each in came:
            member.tiers.drop(each)


async def test_a_block_is_kept_behind_the_one_before_it_and_not_without():
    async with a_member(host()) as member:
        member.fill(range(2))
        assert await member.keep(NAMES[:2]) == {"host": NAMES[:2]}
        assert await member.keep(NAMES[2:4], parent=NAMES[1]) == {"host": NAMES[2:4]}
        piece = Piece(partition=THEIRS, names=(NAMES[5], NAMES[6]), parents=(NAMES[4], NAMES[5]))
        order = link_pb2.TierOrder(keep=piece_message(7, piece))
        assert list(order.keep.parents) == [NAMES[4], NAMES[5]]
        assert piece_from(order.keep) == piece


async def test_tiers_are_asked_as_ones_own():
    near, far = KeptTier(BLOCK_BYTES, "host", is_shared=False), KeptTier(BLOCK_BYTES, "ssd", is_shared=False)
    async with a_member(near, far) as member:
        member.fill(range(4))
        assert await member.keep(NAMES[:4], again_for="ssd") == {"ssd": NAMES[:4]}
        assert await member.keep(NAMES[:2]) == {"host": NAMES[:2], "ssd": NAMES[:2]}
        del far.kept[NAMES[3]]
        stack = member.stack
        assert await member.tiers.find(NAMES).future == stack.find(NAMES) == ["host", "host", "ssd"] + [None] * 4
        chains = [NAMES[:3], NAMES[3:5]]
        for only in (None, "host", "ssd"):
            assert await member.tiers.lacking(chains, only) == stack.lacking(chains, only)
        assert await member.tiers.renew(NAMES[:4]) == stack.renew(NAMES[:4])
        came = await member.tiers.fetch(NAMES[:3], ["host", "host", "ssd"]).future
        assert [(run.tier, run.num_blocks) for run in came.runs] == [("host", 2), ("ssd", 1)]
        member.tiers.land(THEIRS, [10, 11, 12], came, 0)
        written = asyncio.wrap_future(member.blocks.threads._writing.submit(lambda: None))
        await written  # what is behind has been done before that
        assert NAMES[2] in near.kept  # promoted


@pytest.mark.parametrize("num_held", [0, 2, 3, 7])
async def test_what_it_has_from_the_beginning_is_told_some_at_a_time(monkeypatch: pytest.MonkeyPatch, num_held: int):
    monkeypatch.setattr(tier_part, "MAX_HELD_AT_ONCE", 3)
    tier, other = KeptTier(BLOCK_BYTES, "ssd", is_shared=False), host()
    monkeypatch.setattr(tier, "held", lambda: NAMES[:num_held])
    async with a_member(other, tier) as member:
        told = [part async for part in member.tiers.held()]
        assert [name for part in told for name in part["ssd"]] == NAMES[:num_held]
        assert all(len(part["ssd"]) <= 3 and part["host"] == [] for part in told)


async def test_what_tiers_counted_is_told():
    async with a_member(host()) as member:
        member.fill(range(2))
        await member.keep(NAMES[:2])
        assert member.tiers.counters == member.stack.counters
        assert member.tiers.counters["host"].num_kept == 2
        assert member.tiers.shared == {"host": False}
    misses = {MissCause.CORRUPT: 3}
    for counters in (TierCounters(num_misses=misses, bytes_held=0, is_up=False), TierCounters(num_hits=1)):
        assert counters_from(tier_message("ssd", counters)) == counters


async def test_nothing_is_asked_of_a_member_whose_tiers_hang(monkeypatch: pytest.MonkeyPatch):
    async with a_member(host()) as member:
        monkeypatch.setattr(threads, "HANGING_S", 0.0)
        member.is_silent = True
        asked = [member.tiers.fetch(NAMES[:1], ["host"])]
        assert not member.tiers.is_full
        asked.append(member.tiers.fetch(NAMES[:1], ["host"]))
        assert member.tiers.is_full
        for each in asked:
            assert not await each.within(0.001)
            each.future.cancel()


async def test_a_fetch_that_is_given_up_before_it_begins_never_does():
    tier = KeptTier(BLOCK_BYTES, "ssd", is_shared=False)
    async with a_member(tier) as member:
        member.fill(range(1))
        await member.keep(NAMES[:1])
        tier.fetch_may_go.clear()
        asked = [member.tiers.fetch(NAMES[:1], ["ssd"]) for _ in range(threads.MAX_HANGING + 1)]
        assert not await asked[-1].within(0.001)
        assert not asked[-1].give_up()  # here it is not known
        assert (await asked[-1].future).names == ()
        assert not any(each.future.done() for each in asked[:-1])
        for each in asked:  # those that have begun come all the same
            each.give_up()
        tier.fetch_may_go.set()
        for each in asked:
            member.tiers.drop(await each.future)
        assert [len((await each.future).names) for each in asked] == [1] * threads.MAX_HANGING + [0]
        assert tier.num_fetched == threads.MAX_HANGING


async def test_of_a_member_without_tiers_nothing_is_asked_or_written():
    async with a_member() as member:
        assert member.tiers.is_full
        assert await member.tiers.lacking([NAMES], None) == set()
        assert await member.tiers.renew(NAMES) == {}
        assert [part async for part in member.tiers.held()] == []


async def test_blocks_that_are_others_have_no_bytes_here():
    async with a_member(host()) as member:
        member.part.exported(next(tier_tickets()), OURS, np.empty((3, 0, BLOCK.block_size, BLOCK.num_features)))
        assert len(member.part.payload(next(tier_tickets()), OURS, 3)) == 3
        assert member.part.payload(next(tier_tickets()), OURS, 3).size == 0


async def test_what_did_not_come_does_not_land():
    async with a_member(host()) as member:
        with pytest.raises(GangDiverged, match="that did not come"):
            member.part.payload(next(tier_tickets()), THEIRS, 1)


async def test_members_that_do_not_agree_end_the_gang():
    member = Member(TierStack([host()]))
    with pytest.raises(GangDiverged, match="order 1 for tiers came where 0 was to come"):
        member.part.obey(link_pb2.TierOrder(number=1, upkeep=link_pb2.TierUpkeep()))
    with pytest.raises(GangDiverged, match="order 0 for tiers is None"):
        member.part.obey(link_pb2.TierOrder())
    with pytest.raises(GangFault, match="answers order 5, which it was not asked"):
        member.orders.answered(link_pb2.TierAnswer(number=5))
    piece = Piece(partition=OURS, names=(NAMES[0],), parents=(None,))
    member.part.obey(link_pb2.TierOrder(number=1, keep=piece_message(0, piece)))
    await member.has_failed.wait()
    assert isinstance(member.faults[0], GangDiverged)
    member.part.close()


def test_tickets_of_tiers_are_never_those_of_handoffs():
    assert not any(map(is_of_tiers, (0, 1, 10**9)))
    assert all(map(is_of_tiers, itertools.islice(tier_tickets(), 3)))


@pytest.mark.parametrize("again_for", [None, "ssd"])
def test_a_piece_is_told_as_it_is(again_for: str | None):
    piece = Piece(partition=3, names=tuple(NAMES[:3]), parents=(None, NAMES[0], NAMES[6]), again_for=again_for)
    told = link_pb2.TierPiece.FromString(piece_message(1 << 62, piece).SerializeToString())
    assert told.ticket == 1 << 62
    assert piece_from(told) == piece
