"""Where and when a decode worker reserves. The scheduler is a stand-in that only says how much runs in a partition."""

from typing import Any

import pytest

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.queue import NeverFits
from moonshard.serving.control.handoff.decode import DecodeSide, DecodeSideConfig
from moonshard.serving.control.handoff.messages import (
    Cause,
    CopyOut,
    Credits,
    Failed,
    Land,
    Manifest,
    Reserve,
    Start,
    Target,
)
from moonshard.serving.control.handoff.reservations import (
    CameBack,
    Enter,
    GivenUp,
    NotHere,
    ReservationAction,
    Reservations,
    ReservationsConfig,
    Reserved,
    Tell,
)
from moonshard.serving.control.request import Request

NUM_PARTITIONS = 4
BLOCK_SIZE = 16
LEASE_S = 20.0
QUEUE_TIMEOUT_S = 5.0
P_EPOCH, D_EPOCH = 1, 2


class QuietBatch:
    def __init__(self, num_spare_slots: int):
        self.spare_slots = num_spare_slots
        self.num_running = 0
        self.blocks_due = 0

    def check(self, request: Request, partition: int | None = None) -> None:
        if request.max_tokens > 100:
            raise NeverFits("max_tokens", "too many")

    def num_blocks_to_grow(self, partition: int) -> int:
        return self.num_running

    def num_spare_slots(self, partition: int) -> int:
        return self.spare_slots

    def num_blocks_due(self, partition: int) -> int:
        return self.blocks_due


class Bench:
    """Reservations of a worker with 4 blocks in each partition, where 4 may wait."""

    def __init__(
        self, num_partitions: int = 1, num_spare_slots: int = 4, num_cells: int = 2, *, has_next_token_kv: bool = False
    ):
        self.batch = QuietBatch(num_spare_slots)
        self.pool = BlockPool(num_partitions, 4, BLOCK_SIZE)
        self.slab = BlockPool(num_partitions, num_cells, 1)
        self.cache = PrefixCache(self.pool, has_next_token_kv=has_next_token_kv)
        side = DecodeSideConfig(session="d", lease_s=LEASE_S, quarantine_s=60.0, max_cells_per_handoff=2)
        self.reservations = Reservations[str](
            ReservationsConfig(max_queued=4, queue_timeout_s=QUEUE_TIMEOUT_S),
            DecodeSide(side, D_EPOCH, self.pool, self.slab),
            pool=self.pool,
            slab=self.slab,
            cache=self.cache,
            batch=self.batch,
        )

    def reserve(
        self, number: int, owner: str = "link", *, partition: int | None = None, now_s: float = 0.0, **asked: Any
    ) -> tuple[ReservationAction[str], ...]:
        request = a_request(number, **asked)
        reserve = Reserve(handoff=request.id, writer_epoch=P_EPOCH, lease_s=100.0)
        return self.reservations.reserve(reserve, request, partition, owner, now_s)

    @property
    def is_as_begun(self) -> bool:
        partitions = range(self.pool.num_partitions)
        is_free = all(pool.counts(p).free == pool.blocks_per_partition for p in partitions for pool in self.pools)
        return is_free and self.reservations.num_handoffs == 0

    @property
    def pools(self) -> tuple[BlockPool, BlockPool]:
        return self.pool, self.slab


def a_request(
    number: int,
    *,
    n: int = 1,
    max_tokens: int = 1,
    num_prompt: int = 1,
    names: tuple[bytes, ...] = (),
    priority: int = 0,
) -> Request:
    prompt = (0,) * num_prompt
    return Request(id=handoff(number), prompt=prompt, max_tokens=max_tokens, n=n, block_names=names, priority=priority)


def handoff(number: int) -> bytes:
    return bytes([number]) * 16


def reserved(actions: tuple[ReservationAction[str], ...]) -> list[int]:
    return [action.target.handoff[0] for action in actions if isinstance(action, Reserved)]


def refused(actions: tuple[ReservationAction[str], ...]) -> list[int]:
    told = [action.message for action in actions if isinstance(action, Tell)]
    return [message.handoff[0] for message in told if isinstance(message, Failed) and message.cause is Cause.OVERLOADED]


def target_of(actions: tuple[ReservationAction[str], ...]) -> Target:
    (answer,) = actions
    assert isinstance(answer, Reserved)
    return answer.target


def last_of(target: Target) -> Manifest:
    return Manifest(
        handoff=target.handoff,
        writer_epoch=P_EPOCH,
        target_epoch=D_EPOCH,
        blocks=(0,),
        grants=target.grants,
        checksums=(0,),
        is_last=True,
    )


def join(bench: Bench, target: Target, now_s: float = 0.0) -> Enter[str]:
    """Its one block lands, and with it the request."""
    start = Start(handoff=target.handoff, tokens=(7,), last=last_of(target))
    (copy,) = bench.reservations.start(start, "link", now_s)
    assert isinstance(copy, CopyOut)
    land, enter, came_back = bench.reservations.verified(copy.ticket, True, now_s)
    assert isinstance(land, Land)
    assert isinstance(enter, Enter)
    assert isinstance(came_back, CameBack)
    return enter


# ---- where


def test_a_partition_whose_cells_are_in_quarantine_is_passed_over_for_one_that_has_some():
    bench = Bench(NUM_PARTITIONS)
    for partition in range(NUM_PARTITIONS - 1):
        bench.slab.quarantine(partition, bench.slab.lease(partition, 2) or ())
    assert target_of(bench.reserve(1)).partition == NUM_PARTITIONS - 1
    bench.reserve(2)
    assert bench.reserve(3) == ()  # the control: now no partition has a cell


def test_a_request_that_names_no_partition_waits_where_the_fewest_do():
    bench = Bench(2, num_spare_slots=-1)
    for number, partition in enumerate([0, 0, 1]):
        bench.reserve(number, partition=partition)
    assert [bench.reservations.num_tokens(partition) for partition in range(2)] == [2, 1]
    bench.reserve(3)
    assert [bench.reservations.num_tokens(partition) for partition in range(2)] == [2, 2]


@pytest.mark.parametrize("num_held", [0, 1, 2])
def test_what_is_known_needs_no_room_where_others_hold_it_too(num_held: int):
    """Of 4 blocks the prompt takes 3, which leaves 1 to grow into: known blocks that are free are taken like others."""
    bench, names = Bench(), (b"n0".ljust(16), b"n1".ljust(16))
    blocks = bench.pool.allocate(0, 2) or ()
    for block, name in zip(blocks, names, strict=True):
        bench.cache.note(0, block, name)
    bench.pool.release(0, blocks[num_held:][::-1])
    bench.batch.num_running = 2
    assert bench.reserve(1, num_prompt=3 * BLOCK_SIZE, names=names) == ()
    bench.batch.num_running = 1
    assert target_of(bench.reservations.admit(0.0)).num_blocks_held == 2


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_where_a_token_has_kv_of_the_token_behind_it_the_last_known_block_comes_anew(num_known: int):
    bench, names = Bench(has_next_token_kv=True), (b"n0".ljust(16), b"n1".ljust(16))
    for block, name in zip(bench.pool.allocate(0, num_known) or (), names, strict=False):
        bench.cache.note(0, block, name)
    target = target_of(bench.reserve(1, num_prompt=3 * BLOCK_SIZE, names=names))
    assert target.num_blocks_held == max(0, num_known - 1)


@pytest.mark.parametrize("blocks_due", [0, 3])
def test_what_the_schedulers_own_queue_is_due_stays_free(blocks_due: int):
    bench = Bench()
    bench.batch.blocks_due = blocks_due
    assert reserved(bench.reserve(1, num_prompt=2 * BLOCK_SIZE)) == ([] if blocks_due else [1])


# ---- in which order


def test_who_waits_is_reserved_for_as_slots_come_free_in_the_order_of_arrival_and_one_ahead():
    bench = Bench(num_spare_slots=-1, num_cells=4)
    for number in range(4):
        assert bench.reserve(number) == ()
    for num_free in range(4):
        bench.batch.spare_slots = num_free - 1
        assert reserved(bench.reservations.admit(0.0)) == ([] if num_free == 0 else [num_free - 1])


def test_of_those_who_wait_the_most_important_are_reserved_for_first_and_of_these_the_oldest():
    bench = Bench(num_spare_slots=-1, num_cells=4)
    for number, priority in enumerate((5, 0, -1, 0)):
        assert bench.reserve(number, priority=priority) == ()
    bench.batch.spare_slots = 4
    assert reserved(bench.reservations.admit(0.0)) == [2, 1, 3, 0]


def test_a_small_request_does_not_pass_a_large_one_of_its_partition():
    bench = Bench()
    bench.batch.num_running = 1
    assert bench.reserve(1, num_prompt=4 * BLOCK_SIZE) == ()
    assert bench.reserve(2) == ()
    bench.batch.num_running = 0
    assert reserved(bench.reservations.admit(0.0)) == [1]


def test_of_those_without_a_cell_one_is_reserved_for_and_the_others_are_refused_in_time():
    bench = Bench(num_spare_slots=0)
    assert reserved(bench.reserve(0)) == [0]
    for number, now_s in ((1, 1.0), (2, 2.0)):
        assert bench.reserve(number, now_s=now_s) == ()
    assert refused(bench.reservations.expire(1.0 + QUEUE_TIMEOUT_S)) == []
    assert refused(bench.reservations.expire(1.5 + QUEUE_TIMEOUT_S)) == [1]
    assert refused(bench.reservations.expire(2.5 + QUEUE_TIMEOUT_S)) == [2]


def test_a_partition_whose_queue_is_as_long_as_may_be_stops_nobody_in_another():
    bench = Bench(NUM_PARTITIONS)
    for number in range(2 + 4):  # two cells, and all that may wait
        assert refused(bench.reserve(number, partition=0)) == []
    assert refused(bench.reserve(6, partition=0)) == [6]
    assert target_of(bench.reserve(7, partition=1)).partition == 1
    bench.reserve(8, partition=1)
    assert bench.reserve(9, partition=1) == ()  # its own share of the queue
    assert refused(bench.reserve(10, partition=1)) == [10]


def test_every_choice_of_a_reservation_counts_as_one_that_needs_a_slot():
    bench = Bench(num_spare_slots=2)
    assert reserved(bench.reserve(1, n=3)) == [1]
    assert bench.reserve(2) == ()
    assert bench.reservations.cancel(handoff(1), "link", 0.0) == (GivenUp(handoff(1)), CameBack())
    assert reserved(bench.reservations.admit(0.0)) == [2]


# ---- whose


def test_what_another_says_of_a_reservation_changes_nothing():
    bench = Bench()
    target = target_of(bench.reserve(1))
    manifest = last_of(target)
    assert bench.reservations.landed(manifest, "other", 0.0) == (NotHere("other", handoff(1)),)
    start = Start(handoff=handoff(1), tokens=(7,), last=manifest)
    assert bench.reservations.start(start, "other", 0.0) == (NotHere("other", handoff(1)),)
    assert bench.reservations.cancel(handoff(1), "other", 0.0) == ()
    assert bench.reservations.close("other", 0.0) == ()
    assert isinstance(bench.reservations.landed(manifest, "link", 0.0)[0], CopyOut)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_an_id_that_another_has_asked_for_is_refused(is_waiting: bool):
    bench = Bench(num_spare_slots=-1 if is_waiting else 4)
    bench.reserve(1)
    with pytest.raises(NeverFits):
        bench.reserve(1, owner="other")
    assert bench.reservations.num_handoffs == 1


def test_asked_twice_it_waits_once_and_answers_with_one_target_until_it_has_joined():
    bench = Bench(num_spare_slots=-1)
    assert bench.reserve(1) == bench.reserve(1) == ()
    assert bench.reservations.num_handoffs == 1
    bench.batch.spare_slots = 4
    target = target_of(bench.reservations.admit(0.0))
    assert target_of(bench.reserve(1)) == target
    join(bench, target)
    assert bench.reserve(1) == ()
    assert bench.reservations.num_handoffs == 0


def test_what_can_never_join_is_refused_and_nothing_of_it_is_kept():
    bench = Bench()
    with pytest.raises(NeverFits):
        bench.reserve(1, max_tokens=101)
    assert bench.is_as_begun


# ---- how it ends


def test_who_is_gone_leaves_nothing_and_others_keep_what_is_theirs():
    bench = Bench(num_spare_slots=1)
    targets = [target_of(bench.reserve(number, owner)) for number, owner in ((1, "gone"), (2, "link"))]
    bench.reserve(3, "gone")
    bench.reserve(4, "link")
    ended = bench.reservations.close("gone", 0.0)
    assert ended == (GivenUp(handoff(3)), GivenUp(handoff(1)), CameBack())
    bench.reservations.drained(handoff(1), P_EPOCH, 0.0)
    assert bench.reservations.num_handoffs == 2
    assert len(targets) == 2


def test_a_lease_that_ends_is_told_to_its_owner_once():
    bench = Bench()
    bench.reserve(1)
    failed = Failed(handoff=handoff(1), epoch=D_EPOCH, cause=Cause.LEASE)
    assert bench.reservations.expire(LEASE_S) == (Tell("link", failed), CameBack())
    assert bench.reservations.expire(LEASE_S) == (CameBack(),)
    bench.reservations.drained(handoff(1), P_EPOCH, LEASE_S)
    assert bench.is_as_begun


def test_whoever_the_scheduler_does_not_take_leaves_nothing():
    bench = Bench()
    enter = join(bench, target_of(bench.reserve(1)))
    assert bench.pool.counts(0).used == 1
    bench.reservations.turned_down(enter.join)
    assert bench.is_as_begun
    assert isinstance(target_of(bench.reserve(1)), Target)  # its id is free again


def test_cells_that_were_landed_are_granted_again_to_their_owner():
    bench = Bench()
    target = target_of(bench.reserve(1, num_prompt=4 * BLOCK_SIZE))
    assert len(target.grants) == 2
    first = Manifest(
        handoff=handoff(1),
        writer_epoch=P_EPOCH,
        target_epoch=D_EPOCH,
        blocks=(0, 1),
        grants=target.grants,
        checksums=(0, 0),
        is_last=False,
    )
    (copy,) = bench.reservations.landed(first, "link", 0.0)
    assert isinstance(copy, CopyOut)
    _, told, _ = bench.reservations.verified(copy.ticket, True, 0.0)
    assert isinstance(told, Tell)
    assert told.owner == "link"
    assert isinstance(told.message, Credits)
