"""What members do together with their parts of blocks is done by all or by none, in the order of the leader."""

import asyncio
import itertools
from concurrent.futures import Future

import numpy as np
import pytest

from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.transfer import Copies, FailureCause, PublishResult, TransferFailed
from moonshard.rpc import link_pb2
from moonshard.serving.gang.members import GangFault
from moonshard.serving.gang.orders import Orders
from moonshard.serving.gang.part import PlanePart, ready_message
from moonshard.serving.gang.plane import GangPlane
from moonshard.serving.gang.steps import GangDiverged
from moonshard.serving.gang.watch import LOOKS_PER_TIMEOUT
from moonshard.serving.transfer.plane import pieces_to
from tests.serving.gang.planes import ALONE, ARRANGED, DATA, TENSOR, TOKENS, Members, Transported, blocks, members

pytestmark = pytest.mark.timeout(60)
CELLS, TO_CELLS = (3, 0, 4), (1, 4, 2)
TICKET = 7


async def staged(source: Members, to: Members, partition: int = 0, seed: int = 0) -> tuple[int, ...]:
    """The checksums of blocks in `CELLS`."""
    pages = source.export(TICKET, partition, blocks(len(CELLS), seed))
    pieces = pieces_to(source.plane.endpoint, to.plane.endpoint)
    return await source.plane.stage(TICKET, partition, CELLS, pages, pieces)


async def published(source: Members, to: Members, partition: int = 0, to_partition: int = 0) -> PublishResult:
    return await source.plane.publish(partition, CELLS, to.plane.endpoint, to_partition, TO_CELLS)


async def copied_out(source: Members, to: Members, sums: tuple[int, ...], to_partition: int = 0) -> str | None:
    pieces = pieces_to(source.plane.endpoint, to.plane.endpoint)
    return await to.plane.copy_out(TICKET, to_partition, TO_CELLS, sums, pieces)


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(ARRANGED, ARRANGED)))
async def test_blocks_go_from_any_members_to_any_members(ours: str, theirs: str):
    network = InprocNetwork()
    source, to = members(network, ARRANGED[ours]), members(network, ARRANGED[theirs])
    partitions = range(source.plane.num_partitions), range(to.plane.num_partitions)
    for seed, (here, there) in enumerate(itertools.product(*partitions)):
        sums = await staged(source, to, here, seed)
        sent = await published(source, to, here, there)
        assert sent.num_bytes == blocks(len(CELLS)).nbytes  # every byte once
        assert await copied_out(source, to, sums, there) is None
        landed = to.land(TICKET, there, len(CELLS))
        for member, part in enumerate(landed):
            expected = to.part_of(member, there, blocks(len(CELLS), seed))
            assert part.tobytes() == expected.tobytes()
            assert part.shape == expected.shape
    assert source.hold_nothing
    assert to.hold_nothing
    assert not source.faults
    assert source.plane.counters.num_bytes == to.plane.num_landed_blocks * to.plane.block_bytes


class Gated(InprocTransport):
    """Its writes end when the test says."""

    def __init__(self, network: InprocNetwork):
        super().__init__(network)
        self.writes: list[Future[PublishResult]] = []

    def publish(self, target_session: str, copies: Copies) -> Future[PublishResult]:
        future: Future[PublishResult] = Future()
        self.writes.append(future)
        return future


def gated_into(ends: list[Gated]) -> Transported:
    """Transports that are added to `ends`."""

    def gated(network: InprocNetwork) -> InprocTransport:
        ends.append(Gated(network))
        return ends[-1]

    return gated


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)


@pytest.mark.parametrize("failing", [0, 1])
async def test_one_members_failed_write_fails_the_write_when_no_member_writes_any_more(failing: int):
    network, ends = InprocNetwork(), list[Gated]()
    source, to = members(network, TENSOR, gated_into(ends)), members(network, TOKENS)
    await staged(source, to)
    writing = asyncio.create_task(published(source, to))
    await until(lambda: all(len(end.writes) == 2 for end in ends))  # each to both members there
    ends[failing].writes[0].set_exception(TransferFailed(FailureCause.TIMED_OUT, "it hangs", may_still_land=True))
    done = PublishResult(num_bytes=1, num_transfers=1, duration_s=0.1)
    others = [write for end in ends for write in end.writes if not write.done()]
    for write in others:
        await asyncio.sleep(0.01)
        assert not writing.done()
        write.set_result(done)
    with pytest.raises(TransferFailed, match="it hangs") as raised:
        await writing
    assert raised.value.cause is FailureCause.TIMED_OUT
    assert raised.value.may_still_land
    source.plane.clear(0, CELLS)  # as when their quarantine ends
    assert source.hold_nothing


@pytest.mark.parametrize("late", [0, 1])
async def test_of_failed_writes_to_several_members_the_one_that_may_still_land_is_told(late: int):
    """Or cells would be used again into which bytes may come."""
    network, ends = InprocNetwork(), list[Gated]()
    source, to = members(network, ALONE, gated_into(ends)), members(network, TENSOR)
    await staged(source, to)
    writing = asyncio.create_task(published(source, to))
    await until(lambda: len(ends[0].writes) == 2)
    for index, write in enumerate(ends[0].writes):
        write.set_exception(TransferFailed(FailureCause.TIMED_OUT, "it hangs", may_still_land=index == late))
    with pytest.raises(TransferFailed) as raised:
        await writing
    assert raised.value.may_still_land


@pytest.mark.parametrize("damaged", [0, 1])
async def test_one_members_damaged_part_fails_the_block_on_all_and_nobody_keeps_any(damaged: int):
    network = InprocNetwork()
    source, to = members(network, DATA), members(network, TENSOR)
    sums = await staged(source, to)
    await published(source, to)
    slab = to.planes[damaged]._slab
    slab.bytes[np.flatnonzero(slab.bytes)[-1]] ^= 1
    assert await copied_out(source, to, sums) is not None
    assert to.hold_nothing
    assert to.plane.num_mismatches == 1
    assert to.plane.num_landed_blocks == 0


async def test_what_is_not_landed_after_all_is_kept_by_nobody():
    network = InprocNetwork()
    source, to = members(network, TENSOR), members(network, TENSOR)
    sums = await staged(source, to)
    await published(source, to)
    assert await copied_out(source, to, sums) is None
    assert not to.hold_nothing
    assert to.plane.drop(TICKET)
    assert to.hold_nothing
    assert not to.plane.drop(TICKET)


async def test_a_follower_stages_once_its_own_exports_are_there_however_many_they_are():
    network = InprocNetwork()
    source, to = members(network, TENSOR), members(network, DATA)
    sent = blocks(len(CELLS))
    pieces = pieces_to(source.plane.endpoint, to.plane.endpoint)
    staging = asyncio.create_task(source.plane.stage(TICKET, 0, CELLS, source.part_of(0, 0, sent), pieces))
    for block in sent:
        await asyncio.sleep(0.01)
        assert not staging.done()
        source.parts[1].exported(TICKET, source.part_of(1, 0, block[None]))
    sums = await staging
    await published(source, to)
    assert await copied_out(source, to, sums) is None


async def test_lands_of_a_ticket_take_its_blocks_one_after_another():
    network = InprocNetwork()
    source, to = members(network, TENSOR), members(network, TENSOR)
    sums = await staged(source, to)
    await published(source, to)
    assert await copied_out(source, to, sums) is None
    taken = [to.parts[1].payload(TICKET, num) for num in (1, 2)]
    assert np.concatenate(taken).tobytes() == to.part_of(1, 0, blocks(len(CELLS))).tobytes()
    with pytest.raises(KeyError):
        to.parts[1].payload(TICKET, 1)


async def test_a_follower_that_carries_out_one_order_after_another_is_at_no_fault_for_the_last():
    told: list[link_pb2.GangOrder] = []
    orders = Orders(2, told.append)
    asked = [orders.ask(link_pb2.GangOrder(copy_out=link_pb2.KvCopyOut())) for _ in range(4)]
    for order in told:
        assert not any(orders.look(2.0) for _ in range(LOOKS_PER_TIMEOUT))
        orders.answered(1, link_pb2.FollowerAnswer(number=order.number, copied=link_pb2.KvCopied()))
    assert all(each.done() for each in asked)


async def test_a_silent_follower_is_noticed_by_looks_and_a_write_may_last():
    network = InprocNetwork()
    source, to = members(network, TENSOR), members(network, DATA)
    source.silent.add(1)
    staging = asyncio.create_task(staged(source, to))
    await until(lambda: source.told)
    assert not any(source.orders.look(2.0) for _ in range(LOOKS_PER_TIMEOUT))
    fault = source.orders.look(2.0)
    assert fault is not None
    assert "member 1" in fault
    staging.cancel()
    writing = asyncio.create_task(published(to, source))
    to.silent.add(1)
    await until(lambda: to.told)
    assert not any(to.orders.look(2.0) for _ in range(3 * LOOKS_PER_TIMEOUT))
    writing.cancel()


async def test_all_followers_have_the_same_orders_in_the_order_of_the_leader():
    had: dict[int, list[link_pb2.GangOrder]] = {1: [], 2: []}

    def tell(order: link_pb2.GangOrder) -> None:
        for orders in had.values():
            orders.append(link_pb2.GangOrder.FromString(order.SerializeToString()))

    orders = Orders(3, tell)
    first = orders.ask(link_pb2.GangOrder(copy_out=link_pb2.KvCopyOut(ticket=1)))
    orders.tell(link_pb2.GangOrder(drop=link_pb2.KvDrop(ticket=1)))
    second = orders.ask(link_pb2.GangOrder(copy_out=link_pb2.KvCopyOut(ticket=2)))
    assert had[1] == had[2]
    assert [order.number for order in had[1]] == [0, 1, 2]
    for member, number in ((2, 2), (1, 2), (1, 0)):
        mismatch = link_pb2.KvMismatch(detail=f"of member {member}")
        orders.answered(member, link_pb2.FollowerAnswer(number=number, mismatch=mismatch))
    assert [answer.mismatch.detail for answer in second.result()] == ["of member 1", "of member 2"]
    assert not first.done()
    for member, number in ((1, 0), (1, 1), (1, 2)):
        with pytest.raises(GangFault):
            orders.answered(member, link_pb2.FollowerAnswer(number=number))


@pytest.mark.parametrize("numbers", [(1,), (0, 0), (0, 2)])
async def test_a_follower_that_was_told_otherwise_notices(numbers: tuple[int, ...]):
    plane = members(InprocNetwork(), TENSOR).planes[1]
    part = PlanePart(plane, lambda _: None, lambda _: None)
    *before, last = (link_pb2.GangOrder(number=number, drop=link_pb2.KvDrop()) for number in numbers)
    for order in before:
        part.obey(order)
    with pytest.raises(GangDiverged):
        part.obey(last)


async def test_members_whose_parts_are_not_a_whole_are_refused():
    network = InprocNetwork()
    first, second = members(network, TENSOR).planes
    ours, theirs = ready_message(first), ready_message(second)
    for others, fault in (([], "no member"), ([ours], "two members"), ([theirs, theirs], "two members")):
        with pytest.raises(GangFault, match=fault):
            GangPlane(first, Orders(2, lambda _: None), others)
    GangPlane(first, Orders(2, lambda _: None), [ready_message(second)])
