"""Handoffs model-checked: whatever the network and the processes do, every request ends once, on verified bytes only.

A failing schedule names its seed and shape; `run(seed, ...)` repeats it.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from moonshard.serving.control.handoff.messages import Cause
from tests.serving.control.handoff.world import World


def run(seed: int, num_partitions: int, *, is_calm: bool = False, num_events: int = 400) -> World:
    world = World(num_partitions, is_calm)
    choices = random.Random(seed)
    try:
        for _ in range(num_events):
            world.act(choices.randrange(1 << 16), choices.randrange(1 << 16))
        world.wind_down(is_network_dead=not is_calm and seed % 2 == 0)
        world.check_all_is_over()
    except Exception as fault:
        fault.add_note(f"schedule: run({seed}, {num_partitions}, is_calm={is_calm}, num_events={num_events})")
        raise
    return world


def check_schedules(seeds: range, num_partitions: int) -> None:
    worlds = [run(seed, num_partitions) for seed in seeds]
    causes = set().union(*(world.tally.failures for world in worlds))
    assert causes == set(Cause), "the schedules do not reach every kind of failure"
    for count in ("num_finished", "num_mismatches", "num_late"):
        assert sum(getattr(world.tally, count) for world in worlds) > 0, count


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_every_request_ends_once_on_verified_bytes_whatever_fails(num_partitions: int):
    check_schedules(range(100, 220), num_partitions)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5_000, 250))
@pytest.mark.parametrize("num_partitions", [1, 4])
def test_ten_thousand_schedules_end_as_they_began(num_partitions: int, first: int):
    check_schedules(range(first, first + 250), num_partitions)


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_without_faults_a_request_fails_only_where_it_is_cancelled_or_refused(num_partitions: int):
    worlds = [run(seed, num_partitions, is_calm=True) for seed in range(20)]
    assert sum(world.tally.num_mismatches for world in worlds) == 0
    assert set().union(*(world.tally.failures for world in worlds)) <= {Cause.CANCELLED, Cause.OVERLOADED}
    assert sum(world.tally.num_finished for world in worlds) > 20


class Handoffs(RuleBasedStateMachine):
    """The same world under hypothesis, which shrinks what it finds."""

    @initialize(num_partitions=st.sampled_from([1, 4]))
    def start(self, num_partitions: int):
        self.world = World(num_partitions)

    @rule(action=st.integers(0, 63), pick=st.integers(0, 63))
    def act(self, action: int, pick: int):
        self.world.act(action, pick)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.wind_down(is_network_dead=False)
            self.world.check_all_is_over()


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(max_examples=20, stateful_step_count=60, deadline=None)


@pytest.mark.slow
class TestManyHandoffs(Handoffs.TestCase):
    settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
