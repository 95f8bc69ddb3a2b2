"""Steps: how prompts become chunks, tokens become rows, and choices fork."""

import pytest

from moonshard.serving.control.plan import (
    CopyPlan,
    DecodePlan,
    Delivered,
    LoadPlan,
    PrefillPlan,
    Sampled,
    needs_slot_state,
)
from moonshard.serving.control.request import FinishReason, Logprobs, Request, SequenceId, SlotId
from moonshard.serving.control.sampling_parameters import Sampling
from tests.serving.control.batching.stepping import (
    BLOCK_SIZE,
    STOP,
    a_request,
    a_scheduler,
    chunks,
    drawn,
    finish,
    launch,
    launch_prefill,
    names,
    steps,
)

# ---- prefill


@pytest.mark.parametrize(
    ("num_prompt", "lengths"),
    [(15, [15]), (16, [16]), (17, [17]), (63, [63]), (64, [64]), (65, [64, 1]), (300, [64, 64, 64, 64, 44])],
)
def test_a_prompt_is_prefilled_in_chunks_and_only_the_last_draws_a_token(num_prompt: int, lengths: list[int]):
    scheduler = a_scheduler()
    scheduler.add(a_request("a", num_prompt, max_tokens=1), 0.0)
    pieces = chunks(list(steps(scheduler)))
    assert [len(piece.tokens) for piece in pieces] == lengths
    assert [piece.start for piece in pieces] == [64 * index for index in range(len(lengths))]
    assert sum((piece.tokens for piece in pieces), ()) == tuple(range(num_prompt))
    assert [len(piece.samples) for piece in pieces] == [0] * (len(lengths) - 1) + [1]
    assert all(len(piece.block_table) == (num_prompt + 1 + BLOCK_SIZE - 1) // BLOCK_SIZE for piece in pieces)
    assert scheduler.is_idle


def test_short_prompts_share_a_step_and_count_padded_to_the_tile():
    scheduler = a_scheduler(q_tile=16)
    for name, num_prompt in (("a", 17), ("b", 15), ("c", 17)):
        scheduler.add(a_request(name, num_prompt), 0.0)
    plan = launch_prefill(scheduler)
    assert [len(chunk.tokens) for chunk in plan.chunks] == [17, 15, 16]
    assert [len(chunk.samples) for chunk in plan.chunks] == [1, 1, 0]


def test_a_step_packs_at_most_the_configured_number_of_sequences():
    scheduler = a_scheduler(max_prefill_sequences=2)
    for name in "abc":
        scheduler.add(a_request(name, 5), 0.0)
    assert names(launch(scheduler)) == ["a", "b"]


def test_prefill_and_decode_take_turns_while_both_have_work():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 10), 0.0)
    scheduler.add(a_request("b", 200), 0.0)
    kinds = [type(plan) for plan in steps(scheduler)]
    assert kinds[:8] == [PrefillPlan, DecodePlan] * 4
    assert set(kinds[8:]) == {DecodePlan}


@pytest.mark.parametrize(
    ("sampling", "min_tokens", "stops", "is_loaded"),
    [
        (Sampling(), 0, {STOP}, False),
        (Sampling(repetition_penalty=1.1), 0, set(), True),
        (Sampling(logit_bias={3: 1.0}), 0, set(), True),
        (Sampling(), 2, {STOP}, True),
        (Sampling(), 2, set(), False),
    ],
)
def test_a_slot_is_loaded_before_its_prefill_only_where_its_state_matters(sampling, min_tokens, stops, is_loaded):
    request = Request(
        id=b"a", prompt=(1, 2), sampling=sampling, stop_token_ids=frozenset(stops), max_tokens=4, min_tokens=min_tokens
    )
    scheduler = a_scheduler()
    scheduler.add(request, 0.0)
    plans = list(steps(scheduler))
    assert needs_slot_state(request) == is_loaded
    assert [type(plan) for plan in plans[:2]] == ([LoadPlan, PrefillPlan] if is_loaded else [PrefillPlan, DecodePlan])
    if is_loaded:
        assert isinstance(plans[0], LoadPlan)
        assert (plans[0].history, plans[0].num_prompt) == ((1, 2), 2)


# ---- decode, and the host one step behind


def test_microbatches_decode_in_turn_and_one_alone_does_not_wait_for_the_others():
    scheduler = a_scheduler(num_microbatches=2)
    for name, max_tokens in (("a", 4), ("b", 3), ("c", 3)):
        scheduler.add(a_request(name, 5, max_tokens=max_tokens), 0.0)
    decoded = [names(plan) for plan in steps(scheduler) if isinstance(plan, DecodePlan)]
    assert decoded == [["b"], ["a", "c"], ["b"], ["a", "c"], ["a"]]


def test_a_row_is_launched_before_the_host_knows_its_input_token():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 10), 0.0)
    plans = [launch(scheduler) for _ in range(3)]
    assert [row.position for plan in plans[1:] if isinstance(plan, DecodePlan) for row in plan.rows] == [10, 11]


def test_nothing_is_launched_beyond_max_tokens():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 10, max_tokens=3), 0.0)
    plans = [launch(scheduler) for _ in range(3)]
    assert scheduler.schedule() is None
    finishes = [finish(scheduler, plan).outputs[0].finish for plan in plans]
    assert finishes == [None, None, FinishReason.LENGTH]
    assert scheduler.is_idle
    assert scheduler.counters().totals.wasted_tokens == 0


def test_a_stop_found_one_step_late_drops_the_extra_token_and_only_then_releases():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 10), 0.0)
    prefill, decode = launch(scheduler), launch(scheduler)
    delivered = finish(scheduler, prefill, token=STOP)
    assert delivered.outputs[0].finish is FinishReason.STOP
    assert delivered.ended == (b"a",)
    assert (scheduler.counts(0).used, scheduler.num_free_slots(0)) == (1, 3)
    assert scheduler.schedule() is None
    assert finish(scheduler, decode) == Delivered()
    assert (scheduler.counts(0).used, scheduler.num_free_slots(0)) == (0, 4)
    assert scheduler.counters().totals.wasted_tokens == 1


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_a_stop_token_ends_a_sequence_after_min_tokens_and_belongs_to_the_output(min_tokens: int):
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 10, min_tokens=min_tokens), 0.0)
    outputs = []
    while (plan := scheduler.schedule()) is not None:
        outputs += finish(scheduler, plan, STOP).outputs
    assert [output.token_ids for output in outputs] == [(STOP,)] * (min_tokens + 1)
    assert [output.finish for output in outputs] == [None] * min_tokens + [FinishReason.STOP]


def test_log_probabilities_come_back_with_their_token():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 10), 0.0)
    plan = launch(scheduler)
    logprobs = Logprobs(-0.5, ((7, -0.5),))
    delivered = scheduler.complete(plan.number, {SequenceId(b"a", 0): Sampled((7,), (logprobs,))})
    assert delivered.outputs[0].logprobs == (logprobs,)


def test_steps_complete_in_launch_order_only():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 10), 0.0)
    first, second = launch(scheduler), launch(scheduler)
    with pytest.raises(ValueError, match="not the oldest"):
        finish(scheduler, second)
    finish(scheduler, first)
    with pytest.raises(ValueError, match="not the oldest"):
        finish(scheduler, first)


# ---- n > 1


@pytest.mark.parametrize("num_prompt", [15, 16, 17, 64, 300])
def test_choices_fork_the_prefill_sharing_full_blocks_and_copying_the_tail(num_prompt: int):
    scheduler = a_scheduler(max_context_tokens=400)
    scheduler.add(a_request("a", num_prompt, n=3), 0.0)
    plans = list(steps(scheduler))
    pieces = chunks(plans)
    assert sum(len(piece.tokens) for piece in pieces) == num_prompt
    assert pieces[-1].samples == tuple((SequenceId(b"a", choice), SlotId(0, choice)) for choice in range(3))
    copies = [plan for plan in plans if isinstance(plan, CopyPlan)]
    rows = next(plan.rows for plan in plans if isinstance(plan, DecodePlan))
    num_full = num_prompt // BLOCK_SIZE
    assert len({row.block_table[:num_full] for row in rows}) == 1
    assert len({row.block_table[num_full] for row in rows}) == 3
    if num_prompt % BLOCK_SIZE:
        source, *targets = (row.block_table[num_full] for row in rows)
        assert [plan.pairs for plan in copies] == [tuple((0, source, target) for target in targets)]
    else:
        assert not copies


def test_followers_are_loaded_before_the_chunk_that_samples_into_their_slots():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 5, n=3, penalty=0.5), 0.0)
    plans = [launch(scheduler) for _ in range(5)]
    assert [type(plan) for plan in plans] == [LoadPlan, LoadPlan, LoadPlan, PrefillPlan, CopyPlan]
    assert [plan.sequence.choice for plan in plans if isinstance(plan, LoadPlan)] == [0, 1, 2]


def test_choices_beyond_the_slots_wait_and_prefill_by_themselves_before_later_requests():
    scheduler = a_scheduler(slots_per_partition=2)
    scheduler.add(a_request("a", 20, n=3), 0.0)
    scheduler.add(a_request("b", 20), 0.0)
    starts = [piece.sequence for piece in chunks(list(steps(scheduler)))]
    assert starts == [SequenceId(b"a", 0), SequenceId(b"a", 2), SequenceId(b"b", 0)]


def test_the_request_ends_with_its_last_choice():
    scheduler = a_scheduler()
    scheduler.add(a_request("a", 16, max_tokens=2, n=2), 0.0)
    prefill = launch(scheduler)
    results = {drawn(prefill)[0]: Sampled((STOP,)), drawn(prefill)[1]: Sampled((7,))}
    delivered = scheduler.complete(prefill.number, results)
    assert delivered.ended == ()
    decode = launch(scheduler)
    assert names(decode) == ["a"]
    assert finish(scheduler, decode).ended == (b"a",)
