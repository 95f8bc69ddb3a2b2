"""Requests that come with their prompt's KV: how they decode, fork, wait for a slot and give way."""

import pytest

from moonshard.serving.control.batching.queue import NeverFits
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import CopyPlan, DecodePlan, LoadPlan
from moonshard.serving.control.request import FinishReason, Request, SlotId
from tests.serving.control.batching.stepping import (
    BLOCK_SIZE,
    STOP,
    a_request,
    a_scheduler,
    chunks,
    finish,
    give_back,
    join,
    launch,
    launch_decode,
    launch_prefill,
    lease,
    names,
    steps,
)

# ---- into the batch


@pytest.mark.parametrize("num_prompt", [15, 16, 17])
def test_a_joined_request_decodes_from_its_loaded_first_token_without_a_prefill(num_prompt: int):
    scheduler = a_scheduler()
    request = a_request("a", num_prompt, max_tokens=4)
    blocks = join(scheduler, request, (5,))
    load = launch(scheduler)
    assert isinstance(load, LoadPlan)
    assert (load.history, load.num_prompt) == ((*request.prompt, 5), num_prompt)
    finish(scheduler, load)
    outputs = []
    for position in range(num_prompt, num_prompt + 3):
        plan = launch_decode(scheduler)
        assert [(row.slot, row.position) for row in plan.rows] == [(load.slot, position)]
        assert plan.rows[0].block_table[: len(blocks)] == blocks
        assert len(plan.rows[0].block_table) == position // BLOCK_SIZE + 1
        outputs += finish(scheduler, plan).outputs
    assert [output.finish for output in outputs] == [None, None, FinishReason.LENGTH]
    assert scheduler.is_idle
    assert scheduler.counts(0).free == 64


@pytest.mark.parametrize("num_prompt", [16, 20, 32])
def test_joined_choices_share_full_blocks_and_copy_the_tail(num_prompt: int):
    scheduler = a_scheduler()
    request = a_request("a", num_prompt, n=3)
    blocks = join(scheduler, request, (5, 6, 8))
    plans = list(steps(scheduler))
    loads = [(plan.sequence.choice, plan.history) for plan in plans if isinstance(plan, LoadPlan)]
    assert loads == [(choice, (*request.prompt, token)) for choice, token in enumerate((5, 6, 8))]
    rows = next(plan.rows for plan in plans if isinstance(plan, DecodePlan))
    num_full = num_prompt // BLOCK_SIZE
    assert [row.position for row in rows] == [num_prompt] * 3
    assert {row.block_table[:num_full] for row in rows} == {blocks[:num_full]}
    source, *targets = (row.block_table[num_full] for row in rows)
    assert len({source, *targets}) == 3
    copies = [plan.pairs for plan in plans if isinstance(plan, CopyPlan)]
    assert copies == ([tuple((0, source, target) for target in targets)] if num_prompt % BLOCK_SIZE else [])
    assert source == blocks[-1] or not copies
    assert not chunks(plans)
    assert scheduler.counts(0).free == 64


def test_a_choice_that_ends_with_its_first_token_gives_no_output_and_the_next_takes_the_blocks():
    scheduler = a_scheduler()
    blocks = join(scheduler, a_request("a", 20, max_tokens=2, n=3), (STOP, 7, 8))
    assert scheduler.counters().num_waiting == 2
    while not isinstance(plan := launch(scheduler), DecodePlan):
        finish(scheduler, plan)
    assert [row.sequence.choice for row in plan.rows] == [1, 2]
    assert plan.rows[0].block_table == blocks
    delivered = finish(scheduler, plan)
    assert [output.sequence.choice for output in delivered.outputs] == [1, 2]
    assert delivered.ended == (b"a",)
    assert scheduler.counts(0).free == 64


@pytest.mark.parametrize(
    ("request_", "token", "goes_on"),
    [
        (a_request("a", 20, max_tokens=8), STOP, False),
        (a_request("a", 20, max_tokens=1), 7, False),
        (a_request("a", 20, max_tokens=8, min_tokens=1), STOP, True),
        (a_request("a", 20, max_tokens=2), 7, True),
    ],
)
def test_a_request_whose_first_token_is_its_last_is_over_at_once(request_: Request, token: int, goes_on: bool):
    scheduler = a_scheduler()
    blocks = lease(scheduler, 2)
    scheduler._pool.land(0, blocks)
    assert scheduler.join(request_, 0, blocks, (token,)) == goes_on
    assert scheduler.is_idle != goes_on
    assert scheduler.counts(0).used == (2 if goes_on else 0)


@pytest.mark.parametrize(
    ("request_", "tokens", "field"),
    [
        (a_request("a", 20), (7,), "id"),
        (a_request("b", 20), (7, 7), "tokens"),
        (a_request("b", 20, max_tokens=50), (7,), "max_tokens"),
    ],
)
def test_a_refused_join_takes_nothing(request_: Request, tokens: tuple[int, ...], field: str):
    scheduler = a_scheduler(max_context_tokens=64)
    join(scheduler, a_request("a", 20))
    blocks = lease(scheduler, 2)
    scheduler._pool.land(0, blocks)
    with pytest.raises(NeverFits) as caught:
        scheduler.join(request_, 0, blocks, tokens)
    assert caught.value.field == field
    assert [scheduler._pool.num_refs(0, block) for block in blocks] == [1, 1]
    assert scheduler.counters().num_waiting == 1
    scheduler._pool.release(0, blocks)
    assert {name for plan in steps(scheduler) for name in names(plan)} == {"a"}
    assert scheduler.counts(0).free == 64


def test_check_refuses_what_add_would_and_keeps_nothing():
    scheduler = a_scheduler(max_context_tokens=64, max_queued_requests=1)
    scheduler.check(a_request("a", 60, max_tokens=4))
    scheduler.check(a_request("a", 60, max_tokens=4))
    with pytest.raises(NeverFits):
        scheduler.check(a_request("a", 60, max_tokens=5))
    assert scheduler.is_idle
    scheduler.add(a_request("a", 60, max_tokens=4), 0.0)
    with pytest.raises(NeverFits):
        scheduler.check(a_request("a", 5))
    scheduler.check(a_request("b", 5))  # a full queue is no reason


# ---- without a slot


def test_a_joiner_without_a_slot_keeps_its_blocks_and_is_never_prefilled():
    scheduler = a_scheduler(slots_per_partition=1)
    scheduler.add(a_request("a", 20, max_tokens=3), 0.0)
    finish(scheduler, launch(scheduler))
    join(scheduler, a_request("b", 20, max_tokens=3))
    plan = launch(scheduler)
    assert names(plan) == ["a"]
    counters = scheduler.counters()
    assert (counters.num_running, counters.num_waiting, counters.queued_tokens) == (1, 1, (0,))
    assert scheduler.num_blocks_to_grow(0) == 2
    assert scheduler.counts(0).used == 4
    finish(scheduler, plan)
    plans = list(steps(scheduler))
    assert [names(plan) for plan in plans if names(plan)] == [["a"], ["b"], ["b"]]
    assert not chunks(plans)


def test_waiting_joiners_are_seated_in_the_order_of_their_arrival():
    scheduler = a_scheduler(slots_per_partition=1)
    for name in "abc":
        join(scheduler, a_request(name, 20, max_tokens=3))
    plans = list(steps(scheduler))
    assert [name for plan in plans for name in names(plan)] == [*"aabbcc"]
    assert scheduler.counts(0).free == 64


def test_a_joiner_has_slot_only_in_the_partition_of_its_blocks():
    scheduler = a_scheduler(num_partitions=2, slots_per_partition=1)
    for name, partition in (("a", 1), ("b", 1), ("c", 0)):
        join(scheduler, a_request(name, 20, max_tokens=2), partition=partition)
    assert [scheduler.num_blocks_to_grow(partition) for partition in range(2)] == [1, 2]
    loads = [(plan.sequence.request_id, plan.slot) for plan in steps(scheduler) if isinstance(plan, LoadPlan)]
    assert loads == [(b"c", SlotId(0, 0)), (b"a", SlotId(1, 0)), (b"b", SlotId(1, 0))]


def test_a_joined_choice_without_room_comes_back_with_its_first_token():
    scheduler = a_scheduler(slots_per_partition=2)
    request = a_request("a", 20, max_tokens=3, n=3)
    join(scheduler, request, (5, 6, 8))
    assert scheduler.num_blocks_to_grow(0) == 3
    plans = list(steps(scheduler))
    assert [(piece.sequence.choice, piece.tokens) for piece in chunks(plans)] == [(2, (*request.prompt, 8))]
    assert scheduler.is_idle
    assert scheduler.counts(0).free == 64


def test_spare_slots_are_the_free_slots_that_landed_requests_leave_over():
    scheduler = a_scheduler(slots_per_partition=2)
    assert scheduler.num_spare_slots(0) == 2
    join(scheduler, a_request("a", 20, max_tokens=2))
    join(scheduler, a_request("b", 20, max_tokens=2, n=2), (5, 6))
    assert scheduler.num_spare_slots(0) == -1
    plan = launch(scheduler)
    assert scheduler.num_spare_slots(0) == 0  # both leaders have slots; the choice without a slot stands in the line
    finish(scheduler, plan)
    list(steps(scheduler))
    assert scheduler.num_spare_slots(0) == 2


@pytest.mark.parametrize("has_slot", [False, True])
def test_cancelling_a_joined_request_gives_its_blocks_back(has_slot: bool):
    scheduler = a_scheduler(slots_per_partition=4 if has_slot else 1)
    scheduler.add(a_request("a", 20, max_tokens=2), 0.0)
    finish(scheduler, launch(scheduler))
    join(scheduler, a_request("b", 20, n=2))
    plan = launch(scheduler)
    assert scheduler.cancel(b"b")
    assert not scheduler.cancel(b"b")
    finish(scheduler, plan)
    assert not chunks(list(steps(scheduler)))
    assert scheduler.counters().totals.wasted_tokens == (2 if has_slot else 0)
    assert scheduler.is_idle
    assert scheduler.counts(0).free == 64
    assert scheduler.num_blocks_to_grow(0) == 0


# ---- who goes first


def test_the_last_free_slot_is_left_to_an_older_request_that_waits_for_it():
    scheduler = a_scheduler(slots_per_partition=1)
    scheduler.add(a_request("a", 20, max_tokens=2), 0.0)
    finish(scheduler, launch(scheduler))
    scheduler.add(a_request("b", 20, max_tokens=2), 0.0)
    join(scheduler, a_request("c", 20, max_tokens=2))
    assert [names(plan) for plan in steps(scheduler) if names(plan)] == [["a"], ["b"], ["b"], ["c"]]


def test_a_joiner_goes_before_a_younger_request():
    scheduler = a_scheduler(slots_per_partition=1)
    join(scheduler, a_request("a", 20, max_tokens=2))
    scheduler.add(a_request("b", 20, max_tokens=2), 0.0)
    assert [names(plan) for plan in steps(scheduler) if names(plan)] == [["a"], ["b"], ["b"]]


def test_joiners_take_every_slot_but_one_while_an_older_request_lacks_blocks():
    scheduler = a_scheduler(num_blocks=8, slots_per_partition=3)
    leased = lease(scheduler, 4)
    scheduler.add(a_request("a", 80, max_tokens=2), 0.0)
    for name in "bcd":
        join(scheduler, a_request(name, 10, max_tokens=3))
    assert [names(plan) for plan in steps(scheduler) if names(plan)] == [["b", "c"], ["b", "c"], ["d"], ["d"]]
    assert scheduler.counters().num_waiting == 1
    give_back(scheduler, leased)
    assert [piece.sequence.request_id for piece in chunks(list(steps(scheduler)))] == [b"a", b"a"]
    assert scheduler.is_idle


def test_a_joined_choice_leaves_the_last_slot_to_an_older_request_too():
    scheduler = a_scheduler(num_blocks=8, slots_per_partition=2, short_share=0.0)
    leased = lease(scheduler, 4)
    scheduler.add(a_request("a", 80, max_tokens=2), 0.0)
    join(scheduler, a_request("b", 10, max_tokens=3, n=2))
    assert [names(plan) for plan in steps(scheduler) if names(plan)] == [["b"], ["b"]]
    give_back(scheduler, leased)
    pieces = [(piece.sequence.request_id, piece.sequence.choice) for piece in chunks(list(steps(scheduler)))]
    assert pieces == [(b"a", 0), (b"a", 0), (b"b", 1)]


def test_an_older_request_that_lacks_the_joiners_own_blocks_does_not_hold_them_up():
    scheduler = a_scheduler(num_blocks=9, slots_per_partition=1)
    scheduler.add(a_request("a", 100, max_tokens=2), 0.0)
    for name in "bc":
        join(scheduler, a_request(name, 20, max_tokens=2))
    assert [names(plan) for plan in steps(scheduler) if names(plan)] == [["b"], ["a"], ["a"], ["a"], ["c"]]


# ---- who gives way


def test_a_joiner_that_waits_gives_way_to_an_older_one_that_grows_and_is_prefilled_later():
    scheduler = a_scheduler(num_blocks=3, slots_per_partition=1)
    scheduler.add(a_request("a", 15, max_tokens=3), 0.0)
    finish(scheduler, launch(scheduler))
    request = a_request("b", 20, max_tokens=3)
    join(scheduler, request, (5,))
    finish(scheduler, launch_decode(scheduler))
    assert scheduler.counts(0).free == 0
    finish(scheduler, launch_decode(scheduler))
    assert scheduler.counters().totals.num_preemptions == 1
    assert scheduler.counters().queued_tokens == (21,)
    assert [piece.tokens for piece in chunks(list(steps(scheduler)))] == [(*request.prompt, 5)]
    assert scheduler.is_idle


def test_of_two_joiners_the_younger_gives_way():
    scheduler = a_scheduler(num_blocks=3, slots_per_partition=1)
    scheduler.add(a_request("a", 15, max_tokens=3), 0.0)
    finish(scheduler, launch(scheduler))
    for name in "bc":
        join(scheduler, a_request(name, 10, max_tokens=3))
    pieces = chunks(list(steps(scheduler)))
    assert [piece.sequence.request_id for piece in pieces] == [b"c"]


def test_choices_of_a_joiner_that_gave_way_come_back_each_with_its_own_first_token():
    scheduler = a_scheduler(num_blocks=4, slots_per_partition=2)
    for name in "ab":
        scheduler.add(a_request(name, 15, max_tokens=3), 0.0)
    finish(scheduler, launch(scheduler))
    join(scheduler, a_request("c", 20, max_tokens=2, n=3), (5, STOP, 6))
    pieces = chunks(list(steps(scheduler)))
    assert [(piece.sequence.choice, piece.tokens[-1]) for piece in pieces] == [(0, 5), (2, 6)]
    assert [len(piece.samples) for piece in pieces] == [1, 1]
    assert scheduler.is_idle


def one_alone_with_leases() -> tuple[Scheduler, tuple[int, ...]]:
    """`a` needs a block for its last token, and the two others of the pool are leased."""
    scheduler = a_scheduler(num_blocks=3)
    scheduler.add(a_request("a", 15, max_tokens=3), 0.0)
    finish(scheduler, launch_prefill(scheduler))
    leased = lease(scheduler, 2)
    finish(scheduler, launch_decode(scheduler))
    assert scheduler.schedule() is None
    return scheduler, leased


def test_a_sequence_alone_waits_for_leased_blocks_and_is_not_preempted():
    scheduler, leased = one_alone_with_leases()
    give_back(scheduler, leased)
    assert finish(scheduler, launch_decode(scheduler)).ended == (b"a",)
    assert scheduler.counters().totals.num_preemptions == 0


def test_a_handoff_that_ends_in_a_join_gives_way_to_the_one_that_waited_for_its_blocks():
    scheduler, leased = one_alone_with_leases()
    scheduler._pool.land(0, leased)
    request = a_request("b", 20, max_tokens=3)
    scheduler.join(request, 0, leased, (5,))
    plans = list(steps(scheduler))
    assert [names(plan) for plan in plans if names(plan)] == [["a"], ["b"], ["b"]]
    assert [piece.tokens for piece in chunks(plans)] == [(*request.prompt, 5)]
    assert scheduler.counts(0).free == 3


def test_the_younger_of_two_gives_way_though_leases_hold_the_rest():
    scheduler = a_scheduler(num_blocks=4)
    for name in "ab":
        scheduler.add(a_request(name, 15, max_tokens=3), 0.0)
    finish(scheduler, launch_prefill(scheduler))
    leased = lease(scheduler, 2)
    finish(scheduler, launch_decode(scheduler))
    assert names(launch_decode(scheduler)) == ["a"]
    assert scheduler.counters().totals.num_preemptions == 1
    assert scheduler.counts(0).leased == len(leased)
