"""What some tier did not keep is tried again: what the device has goes down in the end, and little is tried twice."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from moonshard.kv.prefix import block_names
from moonshard.serving.control.tiers.aside import AGAIN_S, MAX_AGAIN_S
from moonshard.serving.control.tiers.writes import WriteQueue
from moonshard.serving.worker.store.writing import MAX_RENEWALS, PIECE_BLOCKS
from tests.serving.worker.store.virtual_loop import run_virtually
from tests.serving.worker.store.world import BLOCK_SIZE, ROOT, World

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
    world.writing._queue = world.queue = world.queues[0] = WriteQueue(100, range(1), world.stack.names)
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
        num_first, asked_of_other = tier.num_writes, world.tiers[0].num_asked_to_write
        await pass_time(world, AGAIN_S * (1 + 2 + 4) + 1.0)
        calls_per_piece = -(-PIECE_BLOCKS // 3)  # one for each chain
        assert num_first < tier.num_writes <= num_first + 3 * (calls_per_piece + 1)
        before = tier.num_writes
        await pass_time(world, 10 * MAX_AGAIN_S)
        assert before < tier.num_writes <= before + 11 * (calls_per_piece + 1)
        assert world.tiers[0].num_asked_to_write == asked_of_other

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
        assert world.queue.num_aside == 2 * 12
        await compute(world, prompts(20, 36))  # more than the pool has
        await pass_time(world, 1.0)
        on_device = set(world.scheduler.cache.snapshot(0))
        for tier in world.stack.names:
            assert {name for _, name in world.queue._aside[tier]._parents} <= on_device

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


def use(world: World, prompt: Sequence[int]) -> None:
    """As a request does that finds all of it on the device."""
    world.writing.renew(0, block_names(ROOT, prompt, BLOCK_SIZE))


@pytest.mark.parametrize("lost", [[0], [1], [0, 1, 2]])
def test_what_a_tier_lost_of_a_chain_that_is_still_used_it_is_given_again(lost: list[int]):
    async def scenario() -> None:
        world = a_world()
        [prompt] = prompts(0, 1)
        await compute(world, [prompt])
        await pass_time(world, 1.0)
        names = block_names(ROOT, prompt, BLOCK_SIZE)
        for index in lost:
            del world.tiers[1].kept[names[index]]
        await pass_time(world, 1.0)
        assert len(world.tiers[1].kept) == 3 - len(lost)
        num_writes = world.tiers[0].num_writes
        use(world, prompt)
        await pass_time(world, 1.0)
        assert [len(tier.kept) for tier in world.tiers] == [3, 3]
        assert world.tiers[0].num_writes == num_writes  # which has lost nothing

    run(scenario())


def test_what_a_near_tier_lost_and_one_behind_it_has_it_is_not_given_again():
    async def scenario() -> None:
        world = a_world()
        [prompt] = prompts(0, 1)
        await compute(world, [prompt])
        await pass_time(world, 1.0)
        del world.tiers[0].kept[block_names(ROOT, prompt, BLOCK_SIZE)[0]]
        use(world, prompt)
        await pass_time(world, 1.0)
        assert [len(tier.kept) for tier in world.tiers] == [2, 3]

    run(scenario())


def test_a_tier_that_does_not_say_what_it_has_is_given_nothing_again():
    async def scenario() -> None:
        world = a_world()
        [prompt] = prompts(0, 1)
        await compute(world, [prompt])
        await pass_time(world, 1.0)
        world.tiers[1].is_off = True
        use(world, prompt)
        await pass_time(world, 1.0)
        assert world.queue.num_aside == 0

    run(scenario())


def test_what_a_tier_lost_and_the_device_too_is_left_alone():
    async def scenario() -> None:
        world = a_world()
        await compute(world, prompts(0, 1))
        await pass_time(world, 1.0)
        world.tiers[1].kept.clear()
        await compute(world, prompts(20, 36))  # more than the pool has
        await pass_time(world, 10.0)
        kept = set(world.tiers[1].kept)
        use(world, prompts(0, 1)[0])
        await pass_time(world, 0.1)
        assert (world.queue.num_aside, set(world.tiers[1].kept)) == (0, kept)

    run(scenario())


def test_of_chains_that_wait_to_be_looked_for_the_oldest_are_forgotten():
    async def scenario() -> None:
        world = a_world()
        for prompt in prompts(0, 2 * MAX_RENEWALS):
            use(world, prompt)
        assert len(world.writing._renewals) == MAX_RENEWALS
        await pass_time(world, 0.1 * MAX_RENEWALS + 1.0)
        assert len(world.writing._renewals) == 0

    run(scenario())
