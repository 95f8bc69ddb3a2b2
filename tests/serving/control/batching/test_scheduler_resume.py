"""Requests that began in another worker and go on here, from the tokens they have."""

import pytest

from moonshard.serving.control.batching.queue import NeverFits, QueueFull
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import LoadPlan
from moonshard.serving.control.request import FinishReason, SequenceId
from tests.serving.control.batching.stepping import (
    STOP,
    a_request,
    a_scheduler,
    chunks,
    finish,
    launch,
    launch_prefill,
    names,
    steps,
)


def outputs_of(scheduler: Scheduler, token: int = 7) -> list[tuple[int, FinishReason | None]]:
    """Runs to the end: the choice and finish reason of each output."""
    outputs = []
    while (plan := scheduler.schedule()) is not None:
        outputs += [(output.sequence.choice, output.finish) for output in finish(scheduler, plan, token).outputs]
    return outputs


def test_one_of_three_choices_goes_on_from_all_its_tokens_and_ends_the_request():
    scheduler = a_scheduler()
    request = a_request("a", 20, max_tokens=4, n=3)
    scheduler.add(request, 0.0, {1: (5, 6)})
    assert scheduler.counters().num_waiting == 1
    plan = launch_prefill(scheduler)
    (chunk,) = plan.chunks
    assert (chunk.sequence, chunk.tokens) == (SequenceId(b"a", 1), (*request.prompt, 5, 6))
    assert chunk.samples == ((chunk.sequence, chunk.slot),)
    assert finish(scheduler, plan).ended == ()
    last = launch(scheduler)
    delivered = finish(scheduler, last)
    assert [(output.sequence.choice, output.finish) for output in delivered.outputs] == [(1, FinishReason.LENGTH)]
    assert delivered.ended == (b"a",)
    assert scheduler.is_idle


def test_resumed_choices_prefill_each_its_own_tokens_and_are_not_forked():
    scheduler = a_scheduler()
    request = a_request("a", 20, max_tokens=4, n=3)
    scheduler.add(request, 0.0, {2: (5,), 0: ()})
    assert scheduler.counters().queued_tokens == (41,)
    pieces = chunks(list(steps(scheduler)))
    assert [(piece.sequence.choice, piece.tokens) for piece in pieces] == [
        (0, request.prompt),
        (2, (*request.prompt, 5)),
    ]
    assert [len(piece.samples) for piece in pieces] == [1, 1]


def test_a_slot_that_needs_state_is_loaded_with_the_tokens_generated_elsewhere():
    scheduler = a_scheduler()
    request = a_request("a", 20, penalty=0.5)
    scheduler.add(request, 0.0, {0: (5, 6)})
    load = launch(scheduler)
    assert isinstance(load, LoadPlan)
    assert (load.history, load.num_prompt) == ((*request.prompt, 5, 6), 20)


def test_limits_count_the_tokens_generated_elsewhere():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 20, max_tokens=8, min_tokens=3), 0.0, {0: (STOP, STOP)})
    assert outputs_of(scheduler, STOP) == [(0, None), (0, FinishReason.STOP)]
    scheduler.add(a_request("a", 20, max_tokens=4), 0.0, {0: (5, 6)})
    assert outputs_of(scheduler) == [(0, None), (0, FinishReason.LENGTH)]


def test_a_resumed_request_enters_before_all_that_began_here_and_no_full_queue_refuses_it():
    scheduler = a_scheduler(slots_per_partition=1, max_queued_requests=1)
    scheduler.add(a_request("a", 20, max_tokens=2), 0.0)
    with pytest.raises(QueueFull):
        scheduler.add(a_request("b", 20, max_tokens=2), 0.0)
    for name in "cd":
        scheduler.add(a_request(name, 20, max_tokens=3), 0.0, {0: (5,)})
    assert [names(plan) for plan in steps(scheduler)] == [["c"], ["c"], ["d"], ["d"], ["a"], ["a"]]


def test_a_resumed_request_never_expires():
    scheduler = a_scheduler(slots_per_partition=1)
    scheduler.add(a_request("a", 20, max_tokens=2), 0.0)
    scheduler.add(a_request("b", 20, max_tokens=3), 0.0, {0: (5,)})
    assert [request_id for request_id, _ in scheduler.expire(1000.0)] == [b"a"]
    assert {name for plan in steps(scheduler) for name in names(plan)} == {"b"}


@pytest.mark.parametrize(
    "resumed",
    [
        {},
        {3: ()},
        {-1: ()},
        {0: (5,), 3: (5,)},
        {0: (5, 6, 8, 9)},
        {1: (5, 6, 8, 9, 10)},
        {0: (5,), 2: (5, STOP)},
    ],
)
def test_tokens_that_leave_nothing_to_go_on_with_are_refused_and_nothing_is_kept(resumed: dict[int, tuple[int, ...]]):
    scheduler = a_scheduler()
    with pytest.raises(NeverFits) as caught:
        scheduler.add(a_request("a", 20, max_tokens=4, n=3), 0.0, resumed)
    assert caught.value.field == "resumed"
    assert scheduler.is_idle
    assert scheduler.schedule() is None


def test_an_id_in_use_is_not_resumed_beside_itself():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 20), 0.0)
    with pytest.raises(NeverFits) as caught:
        scheduler.add(a_request("a", 20), 0.0, {0: (5,)})
    assert caught.value.field == "id"


def test_cancelling_ends_every_resumed_choice():
    scheduler = a_scheduler(slots_per_partition=1)
    scheduler.add(a_request("a", 20, n=2), 0.0, {0: (5,), 1: (6,)})
    plan = launch(scheduler)
    assert scheduler.cancel(b"a")
    assert finish(scheduler, plan).outputs == ()
    assert scheduler.is_idle
    assert scheduler.counts(0).free == 64
