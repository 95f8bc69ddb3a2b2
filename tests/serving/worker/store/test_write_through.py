"""What some tier did not keep is tried again: what the device has goes down in the end, and little is tried twice."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from moonshard.serving.control.tiers.writes import AGAIN_S, MAX_AGAIN_S
from moonshard.serving.worker.store.writing import PIECE_BLOCKS
from tests.serving.worker.store.virtual_loop import run_virtually
from tests.serving.worker.store.world import BLOCK_SIZE, World

NUM_BLOCKS = 24


def run(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtually(scenario)


async def compute(world: World, prompts: Sequence[Sequence[int]]) -> None:
    """Their blocks are the device's, and nothing runs any more."""
    for prompt in prompts:
        request = world.a_request(prompt)
        world.scheduler.add(request, 0.0, None, 0)
        while request.id not in world.engine.ended:
            world.engine.launch()
            world.complete()


async def settle() -> None:
    """What the event loop has to do now is done, and what follows from that."""
    for _ in range(5):
        await asyncio.sleep(0)


async def pass_time(world: World, seconds: float) -> None:
    """Ticks as the worker does, with threads that take no time."""
    until_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until_s:
        world.tick()
        await settle()
        while world.threads.pending or world.engine.in_flight:
            if world.threads.pending:
                world.threads.run(0)
            world.complete()
            await settle()
        await asyncio.sleep(0.1)


def a_world() -> World:
    world = World(seed=1, num_partitions=1, num_blocks=100)
    world.queue._max_blocks = 100
    return world


def prompts(first: int, number: int) -> list[list[int]]:
    """Of three blocks each."""
    return [[first + index] * (3 * BLOCK_SIZE + 1) for index in range(number)]


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
def test_what_a_tier_did_not_keep_it_keeps_once_it_is_on(which: list[int]):
    async def scenario() -> None:
        world = a_world()
        for index in which:
            world.tiers[index].is_off = True
        await compute(world, prompts(0, NUM_BLOCKS // 3))
        await pass_time(world, 1.0)
        assert [len(tier.kept) for tier in world.tiers] == [0 if i in which else NUM_BLOCKS for i in range(2)]
        for tier in world.tiers:
            tier.is_off = False
        await pass_time(world, AGAIN_S + 1.0)
        assert [len(tier.kept) for tier in world.tiers] == [NUM_BLOCKS, NUM_BLOCKS]
        world.check()
        world.check_written()

    run(scenario())


def test_while_a_tier_is_off_a_piece_at_a_time_is_tried_more_and_more_seldom():
    async def scenario() -> None:
        world = a_world()
        tier = world.tiers[1]
        tier.is_off = True
        await compute(world, prompts(0, NUM_BLOCKS // 3))
        await pass_time(world, 1.0)
        num_first = tier.num_writes
        await pass_time(world, AGAIN_S * (1 + 2 + 4) + 1.0)
        calls_per_piece = -(-PIECE_BLOCKS // 3)  # one for each chain
        assert num_first < tier.num_writes <= num_first + 3 * (calls_per_piece + 1)
        before = tier.num_writes
        await pass_time(world, 10 * MAX_AGAIN_S)
        assert before < tier.num_writes <= before + 11 * (calls_per_piece + 1)

    run(scenario())


def test_a_long_queue_is_emptied_at_once_and_a_short_one_piece_by_piece():
    async def scenario() -> None:
        world = a_world()
        await compute(world, prompts(0, 20))
        await pass_time(world, 0.1)
        assert PIECE_BLOCKS < len(world.queue) <= 0.125 * 100
        before = len(world.queue)
        await pass_time(world, 0.1)
        assert len(world.queue) == before - PIECE_BLOCKS

    run(scenario())


def test_new_blocks_that_are_kept_tell_that_the_others_may_be_tried():
    async def scenario() -> None:
        world = a_world()
        tier = world.tiers[0]
        tier.is_off = True
        await compute(world, prompts(0, 4))
        await pass_time(world, 20 * MAX_AGAIN_S)  # so that it is tried seldom
        await pass_time(world, 1.0)
        tier.is_off = False
        await compute(world, prompts(50, 1))
        await pass_time(world, AGAIN_S + 1.0)
        assert len(tier.kept) == 15

    run(scenario())


def test_what_the_device_lost_meanwhile_is_forgotten():
    async def scenario() -> None:
        world = a_world()
        world.tiers[0].is_off = world.tiers[1].is_off = True
        await compute(world, prompts(0, 4))
        await pass_time(world, 1.0)
        assert world.queue.num_aside == 12
        await compute(world, prompts(20, 36))  # more than the pool has
        await pass_time(world, 1.0)
        on_device = set(world.scheduler.cache.snapshot(0))
        assert {name for _, name in world.queue._aside} <= on_device
        assert world.queue.num_lost > 0

    run(scenario())


def test_the_flush_at_the_end_tries_each_block_once():
    async def scenario() -> None:
        world = a_world()
        world.tiers[0].is_off = world.tiers[1].is_off = True
        await compute(world, prompts(0, 2))
        await pass_time(world, 1.0)
        world.tiers[1].is_off = False
        await compute(world, prompts(2, 2))
        flushing = asyncio.ensure_future(world.writing.flush())
        await pass_time(world, 1.0)
        assert flushing.done()
        assert len(world.tiers[1].kept) == 12
        assert world.queue.num_aside == 0

    run(scenario())
