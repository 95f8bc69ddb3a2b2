"""The scheduler under any run of requests, handoffs, cancels and delays, on a device that checks contents."""

import random
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonshard.kv.blocks import BlockGroup, BlockPool
from moonshard.serving.control.batching.scheduler import SchedulerConfig
from moonshard.serving.control.request import Request
from tests.serving.control.batching.scheduler_bench import Bench, a_bench, a_request
from tests.serving.fake_device import true_output

type Asked = dict[str, Any]

WINDOW = BlockGroup.sliding(window=3, step_tokens=8, block_size=4)

ASKED = st.fixed_dictionaries(
    {
        "num_prompt": st.integers(1, 20),
        "max_tokens": st.integers(1, 16),
        "n": st.integers(1, 4),
        "num_stops": st.integers(0, 3),
        "min_tokens": st.integers(0, 4),
        "penalty": st.sampled_from([0.0, 0.5]),
        "priority": st.sampled_from([0, 0, 0, -1, 1]),
    }
)


class Schedules(RuleBasedStateMachine):
    """Requests, handoffs, cancels, expiries, launches and completions in any order, over pools too small for them."""

    @initialize(
        num_partitions=st.sampled_from([1, 4]),
        num_blocks=st.integers(3, 8),
        slots=st.integers(1, 4),
        depth=st.integers(1, 3),
        q_tile=st.sampled_from([1, 2, 4]),
        num_microbatches=st.sampled_from([1, 1, 2, 3]),
        short_share=st.sampled_from([0.0, 0.5, 0.75]),
        q_len=st.sampled_from([1, 1, 2, 4]),
        has_next_token_kv=st.booleans(),
        groups=st.sampled_from([(BlockGroup(),)] * 3 + [(BlockGroup(), WINDOW), (WINDOW,)]),
    )
    def start(self, num_partitions: int, num_blocks: int, depth: int, **kinds: Any):
        self.bench = a_bench(num_partitions, num_blocks, **kinds)
        self.depth = depth

    def fitting(self, asked: Asked) -> Request:
        max_context_tokens = min(self.bench.config.max_context_tokens, 40)
        num_prompt = min(asked["num_prompt"], max_context_tokens - 1)
        max_tokens = min(asked["max_tokens"], max_context_tokens - num_prompt)
        return a_request(next(self.bench.numbers), **asked | {"num_prompt": num_prompt, "max_tokens": max_tokens})

    @rule(asked=ASKED)
    def add(self, asked: Asked):
        self.bench.add(self.fitting(asked))

    @rule(asked=ASKED, data=st.data())
    def add_to_a_partition(self, asked: Asked, data: st.DataObject):
        self.bench.add(self.fitting(asked), data.draw(st.integers(0, self.bench.pool.num_partitions - 1)))

    @rule(asked=ASKED, data=st.data())
    def resume(self, asked: Asked, data: st.DataObject):
        request = self.fitting(asked)
        num_generated = {
            choice: data.draw(st.integers(0, len(true_output(request, choice)[0]) - 1))
            for choice in data.draw(st.sets(st.integers(0, request.n - 1), min_size=1))
        }
        self.bench.add_resumed(request, num_generated)

    @rule(asked=ASKED, data=st.data())
    def reserve(self, asked: Asked, data: st.DataObject):
        partition = data.draw(st.integers(0, self.bench.pool.num_partitions - 1))
        self.bench.reserve(self.fitting(asked), partition)

    @precondition(lambda self: self.bench.reserved)
    @rule(data=st.data())
    def join(self, data: st.DataObject):
        self.bench.join(data.draw(st.sampled_from(sorted(self.bench.reserved))))

    @precondition(lambda self: self.bench.reserved)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject):
        self.bench.give_up(data.draw(st.sampled_from(sorted(self.bench.reserved))))

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject):
        self.bench.cancel(data.draw(st.sampled_from(sorted(self.bench.requests))))

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def wait(self, seconds: float):
        self.bench.now_s += seconds
        self.bench.expire()

    @precondition(lambda self: len(self.bench.in_flight) < self.depth)
    @rule()
    def launch(self):
        self.bench.launch()

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def complete(self):
        self.bench.complete()

    @precondition(lambda self: self.bench.live)
    @rule(num_steps=st.integers(2, 8))
    def run(self, num_steps: int):
        """Several steps at full depth: single launches alone seldom reach far into a request."""
        for _ in range(num_steps):
            while len(self.bench.in_flight) < self.depth and self.bench.launch():
                self.bench.check()
            if self.bench.in_flight:
                self.bench.complete()
            self.bench.check()

    @invariant()
    def everything_is_held_once(self):
        self.bench.check()

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.drain(self.depth)
        self.bench.check_end()
        totals = self.bench.scheduler.counters().totals
        event(f"preempted: {totals.num_preemptions > 0}, forked: {self.bench.num_forks > 0}")
        event(f"wasted: {totals.wasted_tokens > 0}, cached: {totals.cached_tokens > 0}")
        event(f"guessed: {self.bench.num_emissions.total() > 0}, cut: {self.bench.num_behind_the_last > 0}")
        event(f"joined: {self.bench.num_join_loads > 0}, prefilled again: {self.bench.num_joined_prefills > 0}")


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestManySchedules(Schedules.TestCase):
    settings = settings(max_examples=400, stateful_step_count=30, deadline=None)


def a_random_request(bench: Bench, draw: random.Random) -> Request:
    limit = bench.config.max_context_tokens
    num_prompt = draw.randint(1, limit // 2)
    return a_request(
        next(bench.numbers),
        num_prompt,
        draw.randint(1, limit - num_prompt),
        n=draw.choice([1, 1, 2, 4]),
        num_stops=draw.randint(0, 1),
        min_tokens=draw.randint(0, 3),
        penalty=draw.choice([0.0, 0.5]),
    )


def begin(bench: Bench, draw: random.Random, *, has_handoffs: bool) -> None:
    """A request from anywhere: new, and perhaps to be handed over or taken over from another worker."""
    request, kind = a_random_request(bench, draw), draw.random() if has_handoffs else 0.0
    if kind < 0.4:
        bench.add(request)
    elif kind < 0.9:
        bench.reserve(request, draw.randrange(bench.pool.num_partitions))
    else:
        choices = draw.sample(range(request.n), draw.randint(1, request.n))
        lengths = {choice: len(true_output(request, choice)[0]) for choice in choices}
        bench.add_resumed(request, {choice: draw.randrange(length) for choice, length in lengths.items()})


def drive(bench: Bench, draw: random.Random, depth: int, num_requests: int, *, has_handoffs: bool = False) -> None:
    """A run in which requests come and go at random while steps are under way."""
    while len(bench.requests) < num_requests:
        action = draw.random()
        if action < 0.15:
            begin(bench, draw, has_handoffs=has_handoffs)
        elif action < 0.17 and bench.live:
            bench.cancel(draw.choice(bench.live))
        elif action < 0.21 and bench.reserved:
            end = bench.give_up if draw.random() < 0.2 else bench.join
            end(draw.choice(list(bench.reserved)))
        elif action < 0.6 and len(bench.in_flight) < depth:
            bench.launch()
        elif bench.in_flight:
            bench.complete()
        bench.check()
    bench.drain(depth)
    bench.check_end()


@pytest.mark.parametrize("has_next_token_kv", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_partitions", [1, 4])
def test_small_pools_preempt_fork_and_waste_and_still_give_the_right_tokens(
    num_partitions: int, depth: int, has_next_token_kv: bool
):
    bench = a_bench(num_partitions, 10, slots=4, has_next_token_kv=has_next_token_kv)
    drive(bench, random.Random(depth), depth, num_requests=50 + 10 * num_partitions)
    totals = bench.scheduler.counters().totals
    assert totals.num_preemptions > 5
    assert bench.num_forks > 5
    assert (bench.num_wasted_uncut > 0) == (depth > 1)
    assert totals.cached_tokens > 100


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_partitions", [1, 4])
def test_joined_and_resumed_requests_share_small_pools_and_still_give_the_right_tokens(num_partitions: int, depth: int):
    bench = a_bench(num_partitions, 10, slots=3)
    drive(bench, random.Random(40 + depth), depth, num_requests=50 + 10 * num_partitions, has_handoffs=True)
    assert bench.num_join_loads > len(bench.joined) / 2
    assert bench.num_joined_prefills > 5
    assert bench.num_waits_for_leases > 0 or num_partitions > 1
    assert len(bench.resumed) > 3
    assert bench.num_held > 5


SMALL = BlockGroup.sliding(window=5, step_tokens=8, block_size=4)  # chunks are of 8 tokens: 4 blocks


@pytest.mark.parametrize(
    ("groups", "num_blocks"),
    [((BlockGroup(), SMALL), 16), ((SMALL, BlockGroup(), SMALL), 26), ((SMALL,), 7), ((BlockGroup(),) * 2, 16)],
)
def test_sequences_of_several_groups_find_what_their_windows_have(groups: tuple[BlockGroup, ...], num_blocks: int):
    benches = [a_bench(1, num_blocks, slots=3, groups=groups) for _ in range(3)]
    for depth, bench in enumerate(benches, start=1):
        drive(bench, random.Random(60 + depth), depth, num_requests=40, has_handoffs=True)
    assert sum(bench.scheduler.counters().totals.num_preemptions for bench in benches) > 5
    assert sum(bench.num_forks for bench in benches) > 5
    assert sum(bench.num_join_loads for bench in benches) > 20
    assert sum(bench.num_held for bench in benches) == 0  # nothing is found again


@pytest.mark.parametrize("max_blocks", [3, 4])
def test_a_bound_below_what_a_step_needs_would_lose_what_it_sees(max_blocks: int):
    """So the bound is no larger than it must be, and the test above can fail."""
    bench = a_bench(1, 12, groups=(BlockGroup(window=6, max_blocks=max_blocks),))
    bench.add(a_request(0, 40, 8))
    if max_blocks == BlockGroup.sliding(6, 8, 4).max_blocks:
        bench.drain(2)
        bench.check_end()
    else:
        with pytest.raises(AssertionError):
            bench.drain(2)


def test_a_sequence_far_longer_than_its_window_holds_no_more_than_its_bound():
    bench = a_bench(1, 12, groups=(SMALL,))
    bench.add(a_request(0, 50, 40))
    most = 0
    while not bench.scheduler.is_idle:
        bench.launch()
        most = max(most, bench.scheduler.counts(0).used)
        bench.complete()
    bench.check_end()
    assert most == SMALL.max_blocks


def test_a_request_may_join_behind_blocks_that_a_decided_step_has_yet_to_write():
    """Blocks are known from the decision on: who joins behind them runs after the step that writes them."""
    bench = a_bench(1, 10)
    bench.add(a_request(0, 8, 4, penalty=0.5))
    bench.launch()  # loads the slot's state; the prefill of the same decision is next
    joining = a_request(3, 10, 4)  # begins alike
    assert bench.reserve(joining, 0)
    assert bench.num_held == 2
    bench.join(joining.id)
    assert bench.num_joins_ahead == 1
    bench.drain(2)
    bench.check_end()


@pytest.mark.slow
@pytest.mark.parametrize("has_handoffs", [False, True])
@pytest.mark.parametrize("num_partitions", [1, 4])
@pytest.mark.parametrize("seed", range(100))
def test_many_long_runs_over_small_pools_give_the_right_tokens(num_partitions: int, seed: int, has_handoffs: bool):
    shape: dict[str, Any] = {"slots": 1 + seed % 5, "num_microbatches": 1 + seed % 3, "q_len": (1, 4, 2)[seed % 7 % 3]}
    shape["has_next_token_kv"] = seed % 11 % 2 == 1
    bench = a_bench(num_partitions, 3 + seed % 12, **shape)
    drive(bench, random.Random(1000 + seed), 1 + seed % 3, num_requests=100, has_handoffs=has_handoffs)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_partitions", [1, 4])
def test_prompts_around_block_and_chunk_edges_give_the_right_tokens(num_partitions: int, depth: int):
    config = SchedulerConfig(
        slots_per_partition=4,
        chunk_tokens=64,
        q_tile=8,
        max_context_tokens=400,
        max_queued_requests=100,
        queue_timeout_s=30.0,
    )
    bench = Bench(config, BlockPool(num_partitions, 27, 16))
    for number, num_prompt in enumerate([300, 15, 16, 17, 63, 64, 65]):
        bench.add(a_request(number, num_prompt, 64, n=1 + number % 3, penalty=0.5 * (number % 2)))
    bench.drain(depth)
    bench.check_end()
    assert num_partitions > 1 or bench.scheduler.counters().totals.num_preemptions > 0
