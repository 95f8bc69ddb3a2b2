"""What a gateway may get wrong in a handoff's messages: it ends that handoff, and neither worker."""

import asyncio
from collections.abc import Callable

import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.control.handoff import messages as m
from tests.engine_room import long_text
from tests.serving.pd.pd_pair import Pair, prefill_handoffs, run, running
from tests.sizes import BLOCK_SIZE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.timeout(120)]


def forge(pair: Pair, *, to_prefill=None, to_decode=None) -> None:
    """Changes messages on their way to a worker."""

    def through(change, forward):
        def send(message, link):
            change(message)
            forward(message, link)

        return send

    if to_prefill is not None:
        pair.to_prefill = through(to_prefill, pair.to_prefill)
    if to_decode is not None:
        pair.to_decode = through(to_decode, pair.to_decode)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits, checking on every round of the event loop."""
    while True:
        if is_so():
            return
        await asyncio.sleep(0)


async def assert_serves(pair: Pair) -> None:
    pair.to_prefill, pair.to_decode = pair.prefill.receive, pair.decode.receive
    answer = await pair.ask(run(long_text(40), 4))
    assert answer.cause is None
    assert len(answer.tokens[0]) == 4
    assert not any(worker.engine.failed.done() for worker in (pair.prefill, pair.decode))


def more_blocks(message):
    if message.WhichOneof("message") == "run":
        message.run.target.num_blocks = 1000


def all_held(message):
    if message.WhichOneof("message") == "run":
        message.run.target.num_blocks_held = message.run.target.num_blocks


def one_cell_twice(message):
    if message.WhichOneof("message") == "run":
        for grant in message.run.target.grants:
            grant.cell = 0


def no_region(message):
    if message.WhichOneof("message") == "run":
        message.run.endpoint.regions[0].owner = 7


def far_region(message):
    if message.WhichOneof("message") == "run":
        message.run.endpoint.regions[0].address = 2**64 - 1


def far_partition(message):
    if message.WhichOneof("message") == "run":
        message.run.target.partition = 2**32 - 1
        message.run.endpoint.num_cells = 2**32 - 1


@pytest.mark.parametrize("change", [more_blocks, all_held, one_cell_twice, no_region, far_region, far_partition])
async def test_a_target_that_cannot_be_written_ends_its_handoff_alone(change):
    async with running() as pair:
        forge(pair, to_prefill=change)
        answer = await asyncio.wait_for(pair.ask(run(long_text(100), 8)), 10)
        assert answer.cause is not None
        await assert_serves(pair)


def empty_last(message):
    if message.WhichOneof("message") == "start":
        for field in ("blocks", "grants", "checksums"):
            message.start.last.ClearField(field)


def cell_twice(message):
    if message.WhichOneof("message") == "start":
        message.start.last.grants[1].CopyFrom(message.start.last.grants[0])


@pytest.mark.parametrize("change", [empty_last, cell_twice])
async def test_a_manifest_of_no_blocks_or_of_one_cell_twice_is_corrupt(change):
    async with running() as pair:
        forge(pair, to_decode=change)
        answer = await asyncio.wait_for(pair.ask(run(long_text(30), 8)), 10)
        assert answer.cause is m.Cause.CORRUPT
        await assert_serves(pair)


async def test_an_epoch_of_another_length_is_turned_down():
    async with running() as pair:

        def longer(message):
            if message.WhichOneof("message") == "reserve":
                message.reserve.writer_epoch = bytes([1]) * 20

        forge(pair, to_decode=longer)
        answer = await asyncio.wait_for(pair.ask(run(long_text(30), 8)), 10)
        assert answer.failed is not None
        assert answer.failed.field == "writer_epoch"
        await assert_serves(pair)


async def test_a_manifest_that_does_not_pair_up_ends_its_handoff_at_once():
    async with running() as pair:

        def one_checksum_less(message):
            if message.WhichOneof("message") == "start":
                del message.start.last.checksums[-1:]

        forge(pair, to_decode=one_checksum_less)
        answer = await asyncio.wait_for(pair.ask(run(long_text(30), 8)), 10)
        assert answer.failed is not None
        assert answer.failed.field == "blocks"
        assert pair.decode.inspect().load.kv_transfer.num_handoffs == 0
        await assert_serves(pair)


async def test_more_grants_than_there_are_blocks_end_their_handoff():
    async with running() as pair:

        def more_grants(message):
            if message.WhichOneof("message") == "run":
                message.run.target.grants.extend([link_pb2.Grant(cell=0, number=2**40 + i) for i in range(100)])

        forge(pair, to_prefill=more_grants)
        answer = await asyncio.wait_for(pair.ask(run(long_text(30), 8)), 10)
        assert answer.failed is not None
        assert answer.failed.field == "grants"
        await assert_serves(pair)


async def test_a_block_named_twice_is_turned_down_by_its_field_also_where_it_is_known():
    async with running() as pair:
        for names in (b"1" * 16 + b"2" * 16, b"1" * 32):
            answer = pair._expect(each := run(long_text(40), 4, block_names=names))
            pair._local.add(each.request_id)
            pair.to_decode(link_pb2.GatewayMessage(run=each), pair.link(pair.decode))
            await until(lambda answer=answer: answer.is_over.is_set() or answer.failed is not None)
        assert answer.failed is not None
        assert answer.failed.field == "block_names"
        await assert_serves(pair)


async def test_a_request_under_the_id_of_a_reservation_ends_the_handoff_alone():
    async with running() as pair:
        each = run(long_text(30), 60)

        def also_run(message):
            if message.WhichOneof("message") == "start":
                pair.decode.receive(link_pb2.GatewayMessage(run=each), pair.link(pair.decode))

        forge(pair, to_decode=also_run)
        answer = await asyncio.wait_for(pair.ask(each), 10)
        assert answer.cause is not None
        await assert_serves(pair)


async def test_pieces_of_handoffs_given_up_leave_no_checksums():
    async with running() as pair:
        handoffs = prefill_handoffs(pair.prefill)
        for _ in range(10):
            each = run(long_text(100), 8)
            answer = pair.begin(each)
            await until(lambda: handoffs.slab.counts(0).leased > 0)
            pair.cancel(each)
            await answer.is_over.wait()
        await pair.prefill.wait_idle()
        assert not handoffs._checksums


async def test_what_waits_on_a_link_that_goes_is_granted_no_cells():
    async with running(quarantine_s=60.0) as pair:
        runs = [run(long_text(1490), 400)]
        first = pair.begin(runs[0])
        await until(lambda: len(first.tokens.get(0, ())) > 3)
        free_blocks = pair.decode.inspect().partitions[0].free_blocks
        # It waits, for the first needs one of them next.
        runs.append(run(long_text(free_blocks * BLOCK_SIZE, seed=1), 8))
        pair.begin(runs[1])
        link = pair.link(pair.decode)
        pair.decode.close_link(link)
        assert pair.decode.inspect().load.kv_transfer.quarantined_slab_slots == 0
        pair.decode.open_link(link)
        for each in runs:
            pair.cancel(each)
