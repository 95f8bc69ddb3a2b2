"""Growth in a full partition: who gives way, when, and how it comes back."""

from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import LoadPlan
from moonshard.serving.control.request import FinishReason, SequenceId, SlotId
from tests.serving.control.batching.stepping import (
    STOP,
    a_request,
    a_scheduler,
    chunks,
    finish,
    launch,
    launch_decode,
    launch_prefill,
    names,
    steps,
)


def two_that_fill_a_pool() -> Scheduler:
    """`a` and `b` hold two of four blocks each, and both need a third after 16 more tokens; `c` waits."""
    scheduler = a_scheduler(num_blocks=4)
    for name in "abc":
        scheduler.add(a_request(name, 16, max_tokens=32), 0.0)
    finish(scheduler, launch(scheduler))
    for _ in range(16):
        plan = launch(scheduler)
        assert names(plan) == ["a", "b"]
        finish(scheduler, plan)
    return scheduler


def test_growth_preempts_the_youngest_which_resumes_before_later_arrivals_from_all_its_tokens():
    scheduler = two_that_fill_a_pool()
    plan = launch(scheduler)
    assert names(plan) == ["a"]
    assert scheduler.counters().totals.num_preemptions == 1
    finish(scheduler, plan)
    resumed, *others = chunks(list(steps(scheduler)))
    assert resumed.sequence == SequenceId(b"b", 0)
    assert resumed.tokens == (*range(16), *[7] * 17)
    assert [piece.sequence.request_id for piece in others] == [b"c"]


def test_a_preempted_sequence_first_delivers_what_is_in_flight_and_is_loaded_with_it_again():
    scheduler = a_scheduler(num_blocks=3)
    scheduler.add(a_request("a", 15, max_tokens=30, penalty=0.5), 0.0)
    scheduler.add(a_request("b", 15, max_tokens=30, penalty=0.5), 0.0)
    for _ in range(2):
        assert isinstance(launch(scheduler), LoadPlan)
    plans = [launch_prefill(scheduler), launch_decode(scheduler)]
    grown = launch(scheduler)
    assert names(grown) == ["a"]
    assert scheduler.counts(0).free == 0  # b still holds its block
    for number in range(2):
        scheduler.complete(number, {})
    delivered = [len([o for o in finish(scheduler, plan).outputs if o.sequence.request_id == b"b"]) for plan in plans]
    assert delivered == [1, 1]
    assert scheduler.counts(0).free == 1
    finish(scheduler, grown)
    loads = [plan for plan in steps(scheduler) if isinstance(plan, LoadPlan)]
    assert [(plan.history, plan.num_prompt) for plan in loads] == [((*range(15), 7, 7), 15)]


def test_a_row_waits_without_preemption_where_blocks_are_about_to_come_back():
    scheduler = two_that_fill_a_pool()
    scheduler.cancel(b"b")
    assert names(launch(scheduler)) == ["a"]
    scheduler = a_scheduler(num_blocks=3)
    scheduler.add(a_request("a", 15, max_tokens=30), 0.0)
    scheduler.add(a_request("b", 16, max_tokens=2), 0.0)
    plans = [launch(scheduler), launch(scheduler)]
    assert scheduler.schedule() is None  # b has drawn its last token, a waits for b's block
    for plan in plans:
        finish(scheduler, plan)
    assert names(launch(scheduler)) == ["a"]
    assert scheduler.counters().totals.num_preemptions == 0


def test_the_youngest_gives_way_itself_while_older_ones_go_on():
    scheduler = a_scheduler(num_blocks=3)
    scheduler.add(a_request("a", 18, max_tokens=8), 0.0)
    scheduler.add(a_request("b", 15, max_tokens=8), 0.0)
    finish(scheduler, launch(scheduler))
    plan = launch(scheduler)
    assert names(plan) == ["a", "b"]
    finish(scheduler, plan)
    assert names(launch(scheduler)) == ["a"]
    assert scheduler.counters().totals.num_preemptions == 1
    assert scheduler.counts(0).free == 1


def test_a_sequence_in_the_middle_of_its_prefill_can_be_preempted_and_starts_over():
    scheduler = a_scheduler(num_blocks=4, chunk_tokens=16)
    scheduler.add(a_request("a", 15, max_tokens=8), 0.0)
    scheduler.add(a_request("b", 40, max_tokens=8), 0.0)
    plans = list(steps(scheduler))
    pieces = [piece for piece in chunks(plans) if piece.sequence.request_id == b"b"]
    assert [(piece.start, len(piece.tokens)) for piece in pieces] == [(0, 1), (0, 16), (16, 16), (32, 8)]
    assert scheduler.counters().totals.num_preemptions == 1
    assert scheduler.is_idle


def test_a_partition_in_need_preempts_only_its_own():
    scheduler = a_scheduler(num_partitions=2, num_blocks=3, slots_per_partition=2)
    for name, num_prompt, partition in (("a", 15, 0), ("b", 2, 1), ("c", 15, 0), ("d", 2, 1)):
        scheduler.add(a_request(name, num_prompt, max_tokens=30), 0.0, partition=partition)
    prefill = launch_prefill(scheduler)
    assert names(prefill) == ["a", "c", "b", "d"]
    finish(scheduler, prefill)
    finish(scheduler, launch(scheduler))
    assert names(launch(scheduler)) == ["a", "b", "d"]
    assert scheduler.counters().totals.num_preemptions == 1


def test_those_that_gave_way_come_back_in_the_order_of_their_arrival():
    scheduler = a_scheduler(num_blocks=4)
    for name in "abc":
        scheduler.add(a_request(name, 15, max_tokens=30), 0.0)
    pieces = chunks(list(steps(scheduler)))
    assert [piece.sequence.request_id for piece in pieces] == [b"a", b"b", b"c", b"b", b"c"]
    assert [len(piece.tokens) for piece in pieces[3:]] == [33, 17]


def test_a_stop_that_arrives_after_a_preemption_ends_the_sequence_for_good():
    scheduler = a_scheduler(num_blocks=3)
    scheduler.add(a_request("a", 15, max_tokens=30), 0.0)
    scheduler.add(a_request("b", 15, max_tokens=30), 0.0)
    plans = [launch_prefill(scheduler), launch_decode(scheduler), launch_decode(scheduler)]
    assert [names(plan) for plan in plans] == [["a", "b"], ["a", "b"], ["a"]]
    finish(scheduler, plans[0])
    ends = [output.finish for output in finish(scheduler, plans[1], STOP).outputs]
    assert ends == [FinishReason.STOP] * 2
    finish(scheduler, plans[2])
    assert scheduler.is_idle
    assert scheduler.counts(0).free == 3


def test_a_choice_without_room_for_its_copied_tail_is_not_forked():
    scheduler = a_scheduler(num_blocks=3)
    scheduler.add(a_request("a", 40, max_tokens=8, n=2), 0.0)
    pieces = chunks(list(steps(scheduler)))
    assert [(piece.sequence.choice, len(piece.samples)) for piece in pieces] == [(0, 1), (1, 1)]
    assert pieces[1].slot == SlotId(0, 0)
