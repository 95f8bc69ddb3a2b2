"""Who is served first where some are more important: lower priorities are, as in vLLM."""

from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.plan import PrefillPlan
from tests.serving.control.batching.stepping import (
    a_request,
    a_scheduler,
    chunks,
    finish,
    join,
    launch,
    launch_decode,
    launch_prefill,
    names,
    steps,
)


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=12))
def test_the_line_is_served_by_priority_and_of_equals_by_arrival(priorities: list[int]):
    scheduler = a_scheduler(slots_per_partition=1)
    for number, priority in enumerate(priorities):
        scheduler.add(a_request(f"{number:02}", 20, max_tokens=1, priority=priority), 0.0)
    served = [name for plan in steps(scheduler) if isinstance(plan, PrefillPlan) for name in names(plan)]
    by_priority = sorted(range(len(priorities)), key=lambda number: priorities[number])
    assert served == [f"{number:02}" for number in by_priority]


def test_growth_preempts_the_least_important_however_old_it_is():
    scheduler = a_scheduler(num_blocks=3)
    scheduler.add(a_request("a", 15, max_tokens=30, priority=1), 0.0)
    scheduler.add(a_request("b", 15, max_tokens=30), 0.0)
    assert names(finish_and_return(scheduler, launch_prefill(scheduler))) == ["b", "a"]
    decodes = [names(finish_and_return(scheduler, launch_decode(scheduler))) for _ in range(4)]
    assert decodes == [["b", "a"], ["b"], ["b"], ["b"]]
    assert scheduler.counters().totals.num_preemptions == 1
    assert [name for plan in steps(scheduler) if isinstance(plan, PrefillPlan) for name in names(plan)] == ["a"]
    assert scheduler.is_idle


def test_a_more_important_request_takes_no_slot_from_one_that_runs():
    scheduler = a_scheduler(slots_per_partition=1)
    scheduler.add(a_request("a", 20, max_tokens=4, priority=1), 0.0)
    finish(scheduler, launch_prefill(scheduler))
    scheduler.add(a_request("b", 20, max_tokens=1), 0.0)
    assert [names(plan) for plan in steps(scheduler)] == [["a"]] * 3 + [["b"]]


def test_one_that_landed_waits_in_its_order_and_gives_way_only_to_the_more_important():
    scheduler = a_scheduler(num_blocks=4, slots_per_partition=1)
    scheduler.add(a_request("a", 15, max_tokens=40, priority=1), 0.0)
    finish(scheduler, launch_prefill(scheduler))
    for name, priority in (("b", 1), ("c", 0)):
        join(scheduler, a_request(name, 10, max_tokens=2, priority=priority))
    firsts = list(dict.fromkeys(name for plan in steps(scheduler) for name in names(plan)))
    assert firsts == ["a", "c", "b"]


def test_a_short_one_does_not_slow_the_prefill_of_a_more_important_one():
    for priority, expected in ((0, {"long", "short"}), (1, {"long"})):
        scheduler = a_scheduler()
        scheduler.add(a_request("long", 200), 0.0)
        scheduler.add(a_request("short", 10, priority=priority), 0.0)
        assert set(names(launch_prefill(scheduler))) == expected


def test_who_is_always_overtaken_expires_in_time():
    scheduler = a_scheduler(slots_per_partition=1, queue_timeout_s=5.0)
    scheduler.add(a_request("first", 10, max_tokens=500), 0.0)
    launch(scheduler)
    scheduler.add(a_request("late", 10, priority=1), 1.0)
    scheduler.add(a_request("soon", 10), 3.0)
    assert [request_id for request_id, _ in scheduler.expire(6.5)] == [b"late"]
    assert [request_id for request_id, _ in scheduler.expire(8.5)] == [b"soon"]
    assert scheduler.counters().num_waiting == 0


def test_a_cancelled_one_leaves_the_line():
    scheduler = a_scheduler()
    for name, priority in (("a", 1), ("b", 0)):
        scheduler.add(a_request(name, 20, max_tokens=1, priority=priority), 0.0)
    assert scheduler.cancel(b"b")
    assert [piece.sequence.request_id for piece in chunks(list(steps(scheduler)))] == [b"a"]
    assert scheduler.is_idle


def finish_and_return(scheduler, plan):
    finish(scheduler, plan)
    return plan
