"""Short prompts beside a long one: who overtakes whom, and what the overtaken keep."""

import pytest

from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.plan import PrefillPlan
from tests.serving.control.batching.stepping import (
    a_request,
    a_scheduler,
    finish,
    join,
    launch,
    launch_prefill,
    names,
    steps,
)


def prefill_steps(scheduler: Scheduler) -> list[list[tuple[str, int]]]:
    """Of each prefill step until all have ended: who computes how many tokens."""
    plans = [plan for plan in steps(scheduler) if isinstance(plan, PrefillPlan)]
    return [list(zip(names(plan), (len(chunk.tokens) for chunk in plan.chunks), strict=True)) for plan in plans]


def test_a_short_prompt_goes_beside_the_long_one_before_it():
    scheduler = a_scheduler()
    scheduler.add(a_request("long", 150), 0.0)
    scheduler.add(a_request("short", 20), 0.0)
    assert prefill_steps(scheduler) == [[("short", 20), ("long", 44)], [("long", 64)], [("long", 42)]]


def test_one_that_comes_while_the_long_one_is_under_way_does_not_wait_for_its_end():
    scheduler = a_scheduler()
    scheduler.add(a_request("long", 300), 0.0)
    launch(scheduler)
    scheduler.add(a_request("short", 20), 0.0)
    assert names(launch(scheduler)) == ["short", "long"]


def test_shorts_pass_a_second_long_one_that_waits_and_it_does_not_pass_the_first():
    scheduler = a_scheduler()
    for name, num_prompt in (("first", 150), ("second", 150), ("short", 20), ("third", 33)):
        scheduler.add(a_request(name, num_prompt), 0.0)
    assert prefill_steps(scheduler) == [
        [("short", 20), ("first", 44)],
        [("first", 64)],
        [("first", 42), ("second", 22)],
        [("second", 64)],
        [("second", 64)],
        [("third", 33)],
    ]


@pytest.mark.parametrize(("share", "least"), [(0.5, 32), (0.75, 16), (0.1, 64), (0.0, 64)])
def test_however_many_short_ones_come_the_long_one_keeps_its_share_of_every_step(share: float, least: int):
    scheduler = a_scheduler(short_share=share, q_tile=8, slots_per_partition=12, max_context_tokens=1024)
    scheduler.add(a_request("long", 640), 0.0)
    for number in range(80):
        scheduler.add(a_request(f"short {number}", 8, max_tokens=1), 0.0)
    found = prefill_steps(scheduler)
    own = [dict(chunks)["long"] for chunks in found if "long" in dict(chunks)]
    assert sum(own) == 640
    assert min(own[:-1]) == least
    assert [name for chunks in found for name, _ in chunks if name != "long"] == [f"short {i}" for i in range(80)]


def test_a_share_of_zero_is_strictly_the_oldest_first():
    scheduler = a_scheduler(short_share=0.0)
    scheduler.add(a_request("long", 150), 0.0)
    scheduler.add(a_request("short", 5), 0.0)
    assert prefill_steps(scheduler) == [[("long", 64)], [("long", 64)], [("long", 22), ("short", 5)]]


def test_what_is_known_of_a_prompt_does_not_count():
    scheduler = a_scheduler(has_prefix_cache=True)
    scheduler.add(a_request("before", 100, max_tokens=1), 0.0)
    list(steps(scheduler))
    other = a_request("long", 300)
    other = other.__class__(id=other.id, prompt=tuple(range(1000, 1300)), sampling=other.sampling, max_tokens=8)
    scheduler.add(other, 0.0)
    scheduler.add(a_request("again", 110), 0.0)
    assert prefill_steps(scheduler)[0] == [("again", 110 - 96), ("long", 50)]


def test_the_last_slot_is_left_to_the_one_that_is_overtaken():
    scheduler = a_scheduler(slots_per_partition=3)
    for name, num_prompt in (("first", 150), ("second", 150), ("a", 8), ("b", 8)):
        scheduler.add(a_request(name, num_prompt, max_tokens=20), 0.0)
    found = [[name for name, _ in chunks] for chunks in prefill_steps(scheduler)]
    assert found[:3] == [["a", "first"], ["first"], ["first", "second"]]


def test_choices_that_fork_from_a_short_one_leave_the_last_slot_too():
    scheduler = a_scheduler(slots_per_partition=4)
    for name, num_prompt, n in (("first", 150, 1), ("second", 150, 1), ("a", 8, 4)):
        scheduler.add(a_request(name, num_prompt, max_tokens=20, n=n), 0.0)
    plan = launch_prefill(scheduler)
    assert [len(chunk.samples) for chunk in plan.chunks] == [2, 0]
    assert scheduler.num_free_slots(0) == 1


@pytest.mark.parametrize(("num_blocks", "may_pass"), [(21, True), (20, False)])
def test_the_blocks_of_the_one_that_is_overtaken_are_left_to_it(num_blocks: int, may_pass: bool):
    """Each long one has 10 blocks, the short one 1."""
    scheduler = a_scheduler(num_blocks=num_blocks)
    for name, num_prompt in (("first", 150), ("second", 150), ("short", 8)):
        scheduler.add(a_request(name, num_prompt), 0.0)
    assert ("short" in names(launch_prefill(scheduler))) == may_pass


def test_nobody_passes_one_that_has_joined_and_waits_for_a_slot():
    scheduler = a_scheduler(slots_per_partition=3)
    for name, num_prompt in (("running", 5), ("long", 150)):
        scheduler.add(a_request(name, num_prompt, max_tokens=40), 0.0)
    finish(scheduler, launch_prefill(scheduler))
    scheduler.add(a_request("second", 150), 0.0)
    join(scheduler, a_request("joined", 20))  # the last slot is left to the second long one
    scheduler.add(a_request("short", 5), 0.0)
    while (plan := scheduler.schedule()) is not None and not isinstance(plan, PrefillPlan):
        finish(scheduler, plan)
    assert plan is not None
    assert names(plan) == ["long"]


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_is_not_negative_and_leaves_something(share: float):
    with pytest.raises(ValueError, match="short_share"):
        SchedulerConfig(
            slots_per_partition=1,
            chunk_tokens=64,
            short_share=share,
            max_context_tokens=64,
            max_queued_requests=1,
            queue_timeout_s=1.0,
        )
