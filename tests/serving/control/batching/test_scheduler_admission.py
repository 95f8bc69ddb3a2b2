"""Who is admitted, in which order and where; who is refused, expires or is cancelled."""

import pytest

from moonshard.serving.control.batching.queue import NeverFits, QueueFull
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.control.request import Request, SlotId
from tests.serving.control.batching.stepping import (
    a_request,
    a_scheduler,
    chunks,
    finish,
    launch,
    launch_prefill,
    names,
    steps,
)


def test_the_head_of_the_queue_is_not_overtaken_by_one_that_fits():
    scheduler = a_scheduler(num_blocks=4)
    for name, num_prompt in (("a", 30), ("b", 40), ("c", 5)):
        scheduler.add(a_request(name, num_prompt), 0.0)
    plan = launch(scheduler)
    assert names(plan) == ["a"]
    finish(scheduler, plan)
    later = [names(plan) for plan in steps(scheduler) if isinstance(plan, PrefillPlan)]
    assert later == [["b", "c"]]


def test_a_sequence_is_admitted_only_with_a_block_for_its_first_token_too():
    scheduler = a_scheduler(num_blocks=3)
    scheduler.add(a_request("a", 16), 0.0)
    scheduler.add(a_request("b", 16), 0.0)
    assert names(launch(scheduler)) == ["a"]
    assert scheduler.counts(0).free == 1


def test_a_request_goes_where_the_fewest_tokens_are_unless_a_partition_is_named():
    scheduler = a_scheduler(num_partitions=2, slots_per_partition=2, chunk_tokens=256)
    for name, num_prompt in (("a", 60), ("b", 20), ("c", 10)):
        scheduler.add(a_request(name, num_prompt), 0.0)
    assert [chunk.slot for chunk in launch_prefill(scheduler).chunks] == [SlotId(0, 0), SlotId(1, 0), SlotId(1, 1)]
    scheduler = a_scheduler(num_partitions=3, chunk_tokens=256)
    for name, partition in (("a", 2), ("b", 2), ("c", 0)):
        scheduler.add(a_request(name, 20), 0.0, partition=partition)
    assert [chunk.slot for chunk in launch_prefill(scheduler).chunks] == [SlotId(0, 0), SlotId(2, 0), SlotId(2, 1)]


def test_a_partition_that_does_not_exist_is_refused_by_name():
    scheduler = a_scheduler(num_partitions=2)
    for partition in (-1, 2):
        with pytest.raises(NeverFits, match="there is no partition") as caught:
            scheduler.add(a_request("a", 20), 0.0, partition=partition)
        assert caught.value.field == "partition"
    assert scheduler.is_idle


def test_a_full_partition_stops_nobody_in_another():
    scheduler = a_scheduler(num_partitions=2, num_blocks=4)
    for name, partition in (("a", 0), ("b", 0), ("c", 0), ("d", 1)):
        scheduler.add(a_request(name, 60, max_tokens=4), 0.0, partition=partition)
    plan = launch_prefill(scheduler)
    assert names(plan) == ["a", "d"]
    finish(scheduler, plan)
    assert names(launch(scheduler)) == ["a", "d"]


def test_each_partition_has_a_budget_and_an_unfinished_prefill_of_its_own():
    scheduler = a_scheduler(num_partitions=2)
    for name, partition in (("a", 0), ("b", 1), ("c", 1)):
        scheduler.add(a_request(name, 100), 0.0, partition=partition)
    first, second = launch_prefill(scheduler), launch_prefill(scheduler)
    assert [(names(plan), [len(chunk.tokens) for chunk in plan.chunks]) for plan in (first, second)] == [
        (["a", "b"], [64, 64]),
        (["a", "b", "c"], [36, 36, 28]),
    ]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (a_request("a", 0), "prompt"),
        (a_request("a", 64, max_tokens=1), "prompt"),
        (a_request("a", 60, max_tokens=5), "max_tokens"),
        (a_request("a", 5, max_tokens=0), "max_tokens"),
        (a_request("a", 5, n=0), "n"),
    ],
)
def test_what_can_never_run_is_refused_at_once_naming_the_field(request_: Request, field: str):
    for scheduler in (a_scheduler(max_context_tokens=64), a_scheduler(num_blocks=4)):
        with pytest.raises(NeverFits) as caught:
            scheduler.add(request_, 0.0)
        assert caught.value.field == field
        assert scheduler.is_idle
        scheduler.add(a_request("a", 60, max_tokens=4), 0.0)


def test_an_id_in_use_is_refused_and_the_first_request_goes_on():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 5), 0.0)
    with pytest.raises(NeverFits):
        scheduler.add(a_request("a", 6), 0.0)
    assert [len(piece.tokens) for piece in chunks(list(steps(scheduler)))] == [5]


def test_a_full_queue_refuses_and_says_when_to_come_back():
    scheduler = a_scheduler(slots_per_partition=1, max_queued_requests=2)
    scheduler.add(a_request("a", 5), 0.0)
    launch(scheduler)
    scheduler.add(a_request("b", 5), 1.0)
    scheduler.add(a_request("c", 5), 2.0)
    with pytest.raises(QueueFull) as caught:
        scheduler.add(a_request("d", 5), 8.0)
    assert caught.value.retry_after_s == 7.0


def test_a_queue_filled_by_one_partition_leaves_each_other_its_share():
    scheduler = a_scheduler(num_partitions=2, max_queued_requests=4)
    for number in range(4):
        scheduler.add(a_request(f"a{number}", 5), 0.0, partition=0)
    scheduler.add(a_request("b", 5), 0.0, partition=1)
    scheduler.add(a_request("c", 5), 0.0)
    for partition in (0, 1):
        with pytest.raises(QueueFull):
            scheduler.add(a_request("d", 5), 0.0, partition=partition)


def test_only_a_request_that_was_never_admitted_expires():
    scheduler = a_scheduler(num_blocks=4, slots_per_partition=2)
    for name, now_s in (("a", 0.0), ("b", 1.0), ("c", 2.0), ("d", 20.0)):
        scheduler.add(a_request(name, 17, max_tokens=40), now_s)
    finish(scheduler, launch(scheduler))
    while not scheduler.counters().totals.num_preemptions:
        finish(scheduler, launch(scheduler))
    assert scheduler.expire(32.0) == []
    assert [request_id for request_id, _ in scheduler.expire(32.1)] == [b"c"]
    assert {name for plan in steps(scheduler) for name in names(plan)} == {"a", "b", "d"}
    assert scheduler.is_idle


def test_cancelling_what_waits_ends_it_at_once():
    scheduler = a_scheduler(slots_per_partition=1)
    for name in "ab":
        scheduler.add(a_request(name, 5, max_tokens=2), 0.0)
    first = launch(scheduler)
    assert scheduler.cancel(b"b")
    assert not scheduler.cancel(b"b")
    finish(scheduler, first)
    assert {name for plan in steps(scheduler) for name in names(plan)} == {"a"}
    assert scheduler.is_idle


def test_cancelling_what_runs_releases_after_its_last_launched_step():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 40, n=2), 0.0)
    plans = [launch(scheduler) for _ in range(3)]
    assert scheduler.cancel(b"a")
    assert scheduler.schedule() is None
    for plan in plans:
        assert scheduler.counts(0).used == 4
        assert finish(scheduler, plan).outputs == ()
    assert scheduler.is_idle
    assert (scheduler.counts(0).used, scheduler.num_free_slots(0)) == (0, 4)
    assert scheduler.counters().totals.wasted_tokens == 4


def test_cancelling_in_the_middle_of_a_prefill_lets_the_next_request_begin():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 300, n=2), 0.0)
    scheduler.add(a_request("b", 40), 0.0)
    first = launch(scheduler)
    scheduler.cancel(b"a")
    assert names(launch(scheduler)) == ["b"]
    finish(scheduler, first)
    assert scheduler.counts(0).used == 3


def test_cancelling_between_steps_releases_at_once_and_the_id_may_be_used_again():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 40), 0.0)
    finish(scheduler, launch(scheduler))
    scheduler.cancel(b"a")
    assert scheduler.is_idle
    assert scheduler.counts(0).used == 0
    scheduler.add(a_request("a", 20, max_tokens=1), 0.0)
    assert [len(piece.tokens) for piece in chunks(list(steps(scheduler)))] == [20]


def test_counters_tell_what_runs_what_waits_and_what_is_left_to_prefill():
    scheduler = a_scheduler(slots_per_partition=1)
    scheduler.add(a_request("a", 100), 0.0)
    scheduler.add(a_request("b", 30, n=3), 0.0)
    launch(scheduler)
    counters = scheduler.counters()
    assert (counters.num_running, counters.num_waiting) == (1, 3)
    assert (counters.queued_tokens, counters.active_tokens) == ((36 + 30,), (100,))
    assert (counters.totals.num_prefill_steps, counters.totals.prefill_tokens) == (1, 64)
    launch(scheduler)
    launch(scheduler)
    counters = scheduler.counters()
    assert (counters.queued_tokens, counters.active_tokens) == ((30,), (102,))
    assert (counters.totals.num_decode_steps, counters.totals.decode_tokens) == (1, 1)


def test_of_whom_something_is_brought_keeps_its_place_and_others_go_first():
    scheduler = a_scheduler(slots_per_partition=3, chunk_tokens=256)
    asked = list[bytes]()
    requests = [a_request(name, 20) for name in ("a", "b", "c")]

    def bring(request_id: bytes) -> bool:
        asked.append(request_id)
        return request_id == requests[0].id and asked.count(request_id) == 1

    scheduler.bring_with(bring)
    for request in requests[:2]:
        scheduler.add(request, 0.0)
    plan = launch_prefill(scheduler)
    assert names(plan) == ["b"]
    scheduler.add(requests[2], 0.0)
    scheduler.take_back(0, requests[0].id)
    finish(scheduler, plan)
    assert [names(plan) for plan in steps(scheduler) if isinstance(plan, PrefillPlan)] == [["a", "c"]]
    assert asked == [requests[0].id, requests[1].id, requests[0].id, requests[2].id]


def test_nobody_is_brought_before_there_is_room():
    scheduler = a_scheduler(num_blocks=4)
    asked = list[bytes]()
    scheduler.bring_with(lambda request_id: bool(asked.append(request_id)))
    first, second = a_request("a", 30, max_tokens=1), a_request("b", 40)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    finish(scheduler, launch(scheduler))
    assert asked == [first.id]
    assert names(launch(scheduler)) == ["b"]
    assert asked == [first.id, second.id]


def test_who_is_set_aside_expires_and_is_cancelled_like_any_other():
    scheduler = a_scheduler(queue_timeout_s=5.0)
    scheduler.bring_with(lambda request_id: True)
    requests = [a_request(name, 20) for name in ("a", "b")]
    for request in requests:
        scheduler.add(request, 0.0)
    assert scheduler.schedule() is None
    assert scheduler.cancel(requests[0].id)
    assert [request_id for request_id, _ in scheduler.expire(6.0)] == [requests[1].id]
    for request in requests:
        assert not scheduler.serves(request.id)
        scheduler.take_back(0, request.id)
    assert scheduler.is_idle
