"""Rows that guess at tokens: a step emits from one to `q_len` of them, and the accounts follow what was emitted."""

import random

import pytest

from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import DecodePlan, Delivered, Plan, Sampled
from moonshard.serving.control.request import FinishReason, Logprobs
from tests.serving.control.batching.scheduler_bench import a_bench
from tests.serving.control.batching.stepping import (
    BLOCK_SIZE,
    STOP,
    a_request,
    a_scheduler,
    drawn,
    finish,
    launch,
    launch_decode,
    names,
    one_that_verifies,
)
from tests.serving.control.batching.test_scheduler_machine import drive

Q_LEN = 4


def emit(scheduler: Scheduler, plan: Plan, *tokens: int) -> Delivered:
    """The same tokens for everyone."""
    return scheduler.complete(plan.number, {id: Sampled(tokens) for id in drawn(plan)})


def decoding(
    max_tokens: int = 20,
    num_prompts: tuple[int, ...] = (10,),
    *,
    num_blocks: int = 64,
    q_len: int = Q_LEN,
    **changes: float,
) -> Scheduler:
    """Requests `a`, `b` and so on, whose first tokens are known."""
    scheduler = a_scheduler(1, num_blocks, q_len=q_len, **changes)
    for name, num_prompt in zip("abcd", num_prompts, strict=False):
        scheduler.add(a_request(name, num_prompt, max_tokens), 0.0)
    finish(scheduler, launch(scheduler))
    return scheduler


def places(plan: DecodePlan) -> list[tuple[int, int]]:
    return [(row.position, row.q_len) for row in plan.rows]


@pytest.mark.parametrize("has_handoffs", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_partitions", [1, 4])
def test_whatever_number_of_tokens_each_row_emits_everyone_gets_the_right_ones(
    num_partitions: int, depth: int, has_handoffs: bool
):
    bench = a_bench(num_partitions, 10, slots=4, num_microbatches=1 + depth % 2, q_len=Q_LEN)
    num_requests = 60 + 10 * num_partitions
    drive(bench, random.Random(depth), depth, num_requests=num_requests, has_handoffs=has_handoffs)
    totals = bench.scheduler.counters().totals
    assert min(bench.num_emissions[number] for number in range(1, Q_LEN + 1)) > 5
    assert bench.num_behind_the_last > 0
    assert totals.num_preemptions > 0
    assert totals.cached_tokens > 50


@pytest.mark.parametrize("tokens", [(1,), (1, 2), (1, 2, 3, 4)])
def test_the_next_row_begins_behind_the_tokens_that_were_emitted(tokens: tuple[int, ...]):
    scheduler = decoding()
    plan = launch_decode(scheduler)
    assert places(plan) == [(10, Q_LEN)]
    outputs = emit(scheduler, plan, *tokens).outputs
    assert [output.token_ids for output in outputs] == [tokens]
    assert places(launch_decode(scheduler)) == [(10 + len(tokens), Q_LEN)]


def test_a_row_waits_for_the_result_of_the_one_before_and_for_its_microbatch():
    scheduler = decoding(num_prompts=(10, 10, 10, 10), num_microbatches=2)
    first, second = launch_decode(scheduler), launch_decode(scheduler)
    assert sorted([sorted(names(first)), sorted(names(second))]) == [["a", "c"], ["b", "d"]]
    assert scheduler.schedule() is None
    emit(scheduler, first, 1, 2)
    assert names(launch_decode(scheduler)) == names(first)
    assert scheduler.schedule() is None


def test_who_comes_meanwhile_joins_the_row_whose_result_is_awaited_in_its_next_step():
    scheduler = decoding()
    awaited = launch_decode(scheduler)
    scheduler.add(a_request("b", 10), 0.0)
    prefill = launch(scheduler)
    assert scheduler.schedule() is None
    emit(scheduler, awaited, 1)
    assert scheduler.schedule() is None  # b's first token is not known, from which it guesses
    finish(scheduler, prefill)
    assert names(launch_decode(scheduler)) == ["a", "b"]


def test_tokens_behind_the_one_that_ends_a_sequence_are_dropped_and_count_as_wasted():
    scheduler = decoding()
    logprobs = tuple(Logprobs(-float(token), ()) for token in range(Q_LEN))
    plan = launch_decode(scheduler)
    delivered = scheduler.complete(plan.number, {id: Sampled((1, STOP, 3, 4), logprobs) for id in drawn(plan)})
    (output,) = delivered.outputs
    assert (output.token_ids, output.finish, output.logprobs) == ((1, STOP), FinishReason.STOP, logprobs[:2])
    assert len(delivered.ended) == 1
    assert scheduler.counters().totals.wasted_tokens == 2
    assert scheduler.is_idle


def test_all_tokens_of_a_row_whose_request_was_cancelled_count_as_wasted():
    scheduler = decoding()
    plan = launch_decode(scheduler)
    assert scheduler.cancel(b"a")
    assert emit(scheduler, plan, 1, 2, 3).outputs == ()
    assert scheduler.counters().totals.wasted_tokens == 3
    assert scheduler.counts(0).free == 64


def test_a_row_has_no_more_positions_than_its_request_may_have_tokens():
    scheduler = decoding(max_tokens=7)  # the first came from the prefill
    plan = launch_decode(scheduler)
    assert places(plan) == [(10, Q_LEN)]
    emit(scheduler, plan, 1, 2, 3, 4)
    plan = launch_decode(scheduler)
    assert places(plan) == [(14, 2)]
    (output,) = emit(scheduler, plan, 5, 6).outputs
    assert output.finish is FinishReason.LENGTH
    assert scheduler.counters().totals.wasted_tokens == 0


def test_a_row_has_blocks_for_all_its_positions():
    scheduler = decoding(num_prompts=(BLOCK_SIZE - 1,), q_len=2 * BLOCK_SIZE + 2, max_tokens=100)
    plan = launch_decode(scheduler)
    assert places(plan) == [(BLOCK_SIZE - 1, 2 * BLOCK_SIZE + 2)]
    assert [len(row.block_table) for row in plan.rows] == [4]


def test_nobody_is_preempted_for_a_guess():
    """`a` and `b` hold all three blocks; only `a`, in its second, has room to guess far."""
    scheduler = decoding(num_prompts=(BLOCK_SIZE, BLOCK_SIZE - 2), num_blocks=3)
    assert scheduler.counts(0).free == 0
    plan = launch_decode(scheduler)
    assert names(plan) == ["a", "b"]
    assert places(plan) == [(BLOCK_SIZE, Q_LEN), (BLOCK_SIZE - 2, 2)]
    assert scheduler.counters().totals.num_preemptions == 0


def test_nobody_is_preempted_for_one_whose_result_is_awaited():
    """`a` fills its only block if every guess is right, and needs another one only then."""
    scheduler = decoding(num_prompts=(BLOCK_SIZE - Q_LEN, 2), num_blocks=2)
    plan = launch_decode(scheduler)
    assert scheduler.counts(0).free == 0
    assert scheduler.schedule() is None
    assert scheduler.counters().totals.num_preemptions == 0
    emit(scheduler, plan, 1, 2, 3, 4)
    assert names(launch_decode(scheduler)) == ["a"]
    assert scheduler.counters().totals.num_preemptions == 1


def test_nobody_enters_with_the_block_that_one_whose_result_is_awaited_may_need():
    scheduler = decoding(num_prompts=(BLOCK_SIZE - Q_LEN,), num_blocks=2)
    plan = launch_decode(scheduler)
    scheduler.add(a_request("b", 2), 0.0)
    assert scheduler.schedule() is None
    emit(scheduler, plan, 1, 2, 3, 4)
    assert places(launch_decode(scheduler)) == [(BLOCK_SIZE, Q_LEN)]


def test_a_block_that_a_row_may_have_to_write_again_is_not_known_to_the_cache():
    scheduler = a_scheduler(q_len=Q_LEN, has_prefix_cache=True)
    scheduler.add(a_request("a", BLOCK_SIZE - 1), 0.0)
    finish(scheduler, launch(scheduler))  # all tokens of the first block are known now
    plan = launch_decode(scheduler)  # and the last one's KV is on its way
    names_of = scheduler._accepted[b"a"].leader.names
    assert scheduler.cache.match(0, names_of(1, BLOCK_SIZE)) == ()
    emit(scheduler, plan, 1)
    assert scheduler.cache.match(0, names_of(1, BLOCK_SIZE)) == plan.rows[0].block_table[:1]


def test_a_block_is_known_to_the_cache_only_once_its_tokens_are_emitted():
    scheduler = decoding(num_prompts=(BLOCK_SIZE - 2,), has_prefix_cache=True)
    plan = launch_decode(scheduler)  # writes beyond the end of its first block
    request = plan.rows[0].request
    names_of = scheduler._accepted[request.id].leader.names
    emit(scheduler, plan, 1)
    (row,) = launch_decode(scheduler).rows
    assert row.position == BLOCK_SIZE - 1
    assert scheduler.cache.match(0, names_of(1, BLOCK_SIZE)) == ()
    scheduler.complete(plan.number + 1, {row.sequence: Sampled((2,))})
    assert scheduler.cache.match(0, names_of(1, BLOCK_SIZE)) == row.block_table[:1]


@pytest.mark.parametrize(("q_len", "tokens"), [(1, ()), (1, (1, 2)), (4, ()), (4, (1, 2, 3, 4, 5))])
def test_a_result_of_too_few_or_too_many_tokens_is_refused(q_len: int, tokens: tuple[int, ...]):
    scheduler = decoding(q_len=q_len)
    plan = launch_decode(scheduler)
    with pytest.raises(ValueError, match=f"{len(tokens)} tokens of a draw"):
        emit(scheduler, plan, *tokens)


def test_positions_are_counted_at_launch_whatever_the_rows_emit():
    scheduler = decoding()
    plan = launch_decode(scheduler)
    assert scheduler.counters().active_tokens == (11 + Q_LEN,)
    emit(scheduler, plan, 1)
    assert scheduler.counters().active_tokens == (12,)
    assert scheduler.counters().totals.decode_tokens == Q_LEN


@pytest.mark.parametrize("num_partitions", [1, 2])
def test_nothing_is_guessed_of_more_rows_of_a_partition_than_can_be_verified(num_partitions: int):
    most = 1
    scheduler = one_that_verifies(lambda num_rows: num_rows <= most, num_partitions, q_len=Q_LEN)
    for name in "abcd"[: 2 * num_partitions]:
        scheduler.add(a_request(name, 10, 20), 0.0)
    finish(scheduler, launch(scheduler))
    plan = launch_decode(scheduler)
    assert not plan.is_guessing
    assert {row.q_len for row in plan.rows} == {1}
    emit(scheduler, plan, 5)
    most = 2
    plan = launch_decode(scheduler)
    assert plan.is_guessing
    assert {row.q_len for row in plan.rows} == {Q_LEN}
    emit(scheduler, plan, 6)
