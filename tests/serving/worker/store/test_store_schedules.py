"""Requests, steps, tiers and faults in any order: no block is ever but what its name says, and none is lost."""

import asyncio

import pytest

from moonshard.serving.control.request import SequenceId
from moonshard.serving.worker.store import fetching
from tests.serving.fake_device import true_output
from tests.serving.worker.store.virtual_loop import run_virtually
from tests.serving.worker.store.world import World

NUM_MOVES = 500


async def schedule(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.time, "perf_counter", asyncio.get_running_loop().time)
    for _ in range(NUM_MOVES):
        await world.move()
    await world.finish()
    for request_id in world.live:
        assert world.engine.tokens[SequenceId(request_id, 0)] == true_output(world.requests[request_id], 0)[0]
    for partition in range(world.num_partitions):
        assert world.pool.num_free(partition) == world.pool.blocks_per_partition
    assert world.fetching.num_waiting == 0


def run_schedule(seed: int, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(seed)
    with monkeypatch.context() as patch:
        run_virtually(schedule(world, patch))
    return world


def test_every_block_is_what_its_name_says_and_every_request_ends(monkeypatch: pytest.MonkeyPatch):
    worlds = [run_schedule(seed, monkeypatch) for seed in range(40)]
    assert sum(world.num_from_tiers for world in worlds) > 500  # that it happens at all
    assert sum(world.fetching.num_late for world in worlds) > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 10_100, 1000))
def test_in_ten_thousand_schedules(monkeypatch: pytest.MonkeyPatch, first: int):
    for seed in range(first, first + 1000):
        run_schedule(seed, monkeypatch)
