"""A prompt's beginning that is cached from earlier ones is not computed again, and is reported as cached once."""

from dataclasses import replace

import pytest

from moonshard.kv.prefix import block_names
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import CopyPlan, Plan, PrefillPlan
from moonshard.serving.control.request import Output, Request
from tests.serving.control.batching.stepping import BLOCK_SIZE, a_scheduler, chunks, finish, join, launch_prefill, steps
from tests.serving.control.batching.stepping import a_request as any_request


def a_request(name: str, num_prompt: int, max_tokens: int = 2, **options) -> Request:
    return any_request(name, num_prompt, max_tokens, **options)


def caching(num_blocks: int = 64, **changes) -> Scheduler:
    return a_scheduler(num_blocks=num_blocks, has_prefix_cache=True, **changes)


def run(scheduler: Scheduler, request: Request, partition: int | None = None) -> list[Plan]:
    scheduler.add(request, 0.0, partition=partition)
    return list(steps(scheduler))


def computed(plans: list[Plan]) -> list[tuple[int, int]]:
    """First position and number of tokens of each chunk."""
    return [(chunk.start, len(chunk.tokens)) for chunk in chunks(plans)]


@pytest.mark.parametrize(
    ("num_prompt", "start"),
    [(15, 0), (16, 15), (17, 16), (40, 32), (48, 47), (64, 63)],
)
def test_a_prompt_seen_before_is_computed_from_its_last_block_on_and_a_whole_one_from_its_last_token(
    num_prompt: int, start: int
):
    scheduler = caching()
    run(scheduler, a_request("a", num_prompt))
    assert computed(run(scheduler, a_request("b", num_prompt))) == [(start, num_prompt - start)]


@pytest.mark.parametrize(("num_prompt", "start"), [(15, 0), (16, 15), (17, 15), (40, 31), (48, 47), (64, 63)])
def test_where_a_token_has_kv_of_the_token_behind_it_the_last_that_was_found_is_computed_again(
    num_prompt: int, start: int
):
    scheduler = caching(has_next_token_kv=True)
    first = run(scheduler, a_request("a", num_prompt))
    plans = run(scheduler, a_request("b", num_prompt))
    assert computed(plans) == [(start, num_prompt - start)]
    copies = [pair for plan in plans if isinstance(plan, CopyPlan) for pair in plan.pairs]
    assert len(copies) == (start > 0)
    (chunk,) = chunks(plans)
    for _, original, copy in copies:  # others may read the original, and the one that follows it differs for them
        place = start // BLOCK_SIZE
        assert chunks(first)[0].block_table[place] == original
        assert chunk.block_table[:place] == chunks(first)[0].block_table[:place]
        assert chunk.block_table[place] == copy
        assert copy != original
    assert scheduler._pool.num_free(0) == scheduler._pool.blocks_per_partition


def test_where_there_is_no_room_for_a_copy_a_block_more_is_computed():
    scheduler = caching(num_blocks=2, has_next_token_kv=True)
    run(scheduler, a_request("a", 20))
    assert computed(run(scheduler, a_request("b", 20))) == [(0, 20)]


def test_only_what_begins_alike_is_reused():
    scheduler = caching()
    run(scheduler, a_request("a", 64))
    other = a_request("b", 64)
    assert computed(run(scheduler, replace(other, prompt=(*range(40), *range(100, 124))))) == [(32, 32)]
    assert computed(run(scheduler, replace(other, prompt=(5, *range(1, 64))))) == [(0, 64)]


def test_another_root_shares_nothing():
    scheduler = caching()
    run(scheduler, a_request("a", 64))
    assert computed(run(scheduler, replace(a_request("b", 64), prefix_root=b"another tenant"))) == [(0, 64)]


def test_the_first_output_of_a_request_says_how_much_was_reused():
    scheduler, outputs = caching(), list[Output]()
    for name in "ab":
        scheduler.add(a_request(name, 48, n=2), 0.0)
        while (plan := scheduler.schedule()) is not None:
            outputs += finish(scheduler, plan).outputs
    cached = [(o.sequence.request_id, o.sequence.choice, o.num_cached_tokens) for o in outputs]
    assert [entry for entry in cached if entry[2]] == [(b"b", 0, 47)]
    assert scheduler.counters().totals.cached_tokens == 47


def test_an_answer_is_part_of_the_next_turns_beginning():
    scheduler = caching()
    first = a_request("a", 20, 30)
    run(scheduler, first)
    turn = replace(first, id=b"b", prompt=(*first.prompt, *(7,) * 30, *range(500, 510)))
    assert computed(run(scheduler, turn)) == [(48, 12)]  # of the 49 tokens whose KV there was, the full blocks


def test_what_came_from_elsewhere_is_reused_too():
    scheduler = caching()
    join(scheduler, a_request("a", 50))
    list(steps(scheduler))
    assert computed(run(scheduler, a_request("b", 50))) == [(48, 2)]


def test_who_gives_its_landed_blocks_up_before_it_has_a_slot_comes_back_to_what_is_left_of_them():
    scheduler = caching(num_blocks=6, slots_per_partition=1)
    first = a_request("a", 15, 40)
    scheduler.add(first, 0.0)
    moved = a_request("b", 48)
    names = tuple(block_names(moved.prefix_root, moved.prompt, BLOCK_SIZE))
    join(scheduler, replace(moved, block_names=names))
    plans = list(steps(scheduler))
    assert scheduler.counters().totals.num_preemptions == 1
    assert computed(plans) == [(0, 15), (32, 17)]


def test_sequences_of_one_step_share_what_the_first_of_them_computes():
    scheduler = caching()
    for name in "ab":
        scheduler.add(a_request(name, 24), 0.0)
    plan = launch_prefill(scheduler)
    assert computed([plan]) == [(0, 24), (16, 8)]
    assert plan.chunks[0].block_table[0] == plan.chunks[1].block_table[0]


def test_nothing_is_copied_from_a_block_before_the_step_that_writes_it():
    scheduler = caching()
    for name in "ab":
        scheduler.add(a_request(name, 32), 0.0)
    plan = launch_prefill(scheduler)  # no copy comes before it
    assert computed([plan]) == [(0, 32), (16, 16)]


def test_the_last_token_goes_into_a_copy_of_its_block_while_others_read_it():
    scheduler = caching()
    run(scheduler, a_request("a", 32))
    scheduler.add(a_request("b", 32), 0.0)
    copy, prefill = scheduler.schedule(), scheduler.schedule()
    assert isinstance(copy, CopyPlan)
    assert isinstance(prefill, PrefillPlan)
    ((_, source, copied),) = copy.pairs
    assert prefill.chunks[0].block_table[1] == copied != source


def test_partitions_share_nothing():
    scheduler = caching(num_partitions=2)
    run(scheduler, a_request("a", 64), partition=0)
    assert computed(run(scheduler, a_request("b", 64), partition=1)) == [(0, 64)]
    assert computed(run(scheduler, a_request("c", 64), partition=0)) == [(63, 1)]


def test_a_prompt_that_needs_the_whole_pool_runs_though_all_of_it_is_known():
    scheduler = caching(num_blocks=4)
    run(scheduler, a_request("a", 48, 16))
    assert computed(run(scheduler, a_request("b", 48, 16))) == [(32, 16)]  # there is no room for a copy
    whole = a_request("c", 63, 1)
    run(scheduler, whole)
    assert computed(run(scheduler, replace(whole, id=b"d"))) == [(48, 15)]


def test_room_for_others_is_made_from_what_was_used_longest_ago():
    scheduler = caching(num_blocks=8)
    old, new = a_request("old", 48), replace(a_request("new", 48), prompt=tuple(range(100, 148)))
    run(scheduler, old)
    run(scheduler, new)
    run(scheduler, replace(new, id=b"big", prompt=tuple(range(200, 248))))
    assert computed(run(scheduler, replace(new, id=b"again")))[0][0] > 0
    assert computed(run(scheduler, replace(old, id=b"older")))[0][0] == 0


def test_who_was_preempted_comes_back_to_what_it_had():
    scheduler = caching(num_blocks=6, slots_per_partition=2)
    for name, first in (("a", 0), ("b", 100)):
        request = a_request(name, 31, 40)
        scheduler.add(replace(request, prompt=tuple(range(first, first + 31))), 0.0)
    plans = list(steps(scheduler))
    assert scheduler.counters().totals.num_preemptions == 1
    (again,) = [chunk for chunk in chunks(plans)[2:] if chunk.sequence.request_id == b"b"]
    assert again.start >= BLOCK_SIZE


def test_a_cache_that_is_off_reuses_nothing():
    scheduler = a_scheduler(has_prefix_cache=False)
    run(scheduler, a_request("a", 64))
    assert computed(run(scheduler, a_request("b", 64))) == [(0, 64)]
    assert scheduler.counters().totals.cached_tokens == 0
