"""When blocks of a prompt are fetched, what is landed of them, and who enters when: one case after another."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from moonshard.serving.control.request import Request
from moonshard.serving.worker.store import fetching
from tests.serving.worker.store.virtual_loop import run_virtually
from tests.serving.worker.store.world import BLOCK_SIZE, World


async def until_fetching(world: World) -> None:
    """The one request that waits knows what tiers have, and its fetch waits for a thread."""
    await asyncio.sleep(0)
    world.threads.run(0)
    await asyncio.sleep(0.001)
    assert len(world.threads.pending) == 1


def compute(world: World, prompt: Sequence[int]) -> None:
    """A request of this prompt comes, is served and goes, without a word to the tiers."""
    request = world.a_request(prompt)
    world.scheduler.add(request, 0.0, None, 0)
    while request.id not in world.engine.ended:
        world.engine.launch()
        world.complete()


def in_tier(world: World, request: Request) -> None:
    for name in request.block_names:
        world.tiers[1].kept[name] = np.array(world.right[name], np.int32).tobytes()


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 1, 1, 1, 2]  # four blocks and a token


def test_what_was_computed_meanwhile_is_not_landed_again():
    async def scenario(world: World) -> None:
        request = world.a_request(PROMPT)
        in_tier(world, request)
        world.begin(request)
        await until_fetching(world)
        compute(world, [*PROMPT[:8], 3])
        world.threads.run(0)
        await world.finish()
        assert world.num_from_tiers == 2 * BLOCK_SIZE

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=16)))


def test_what_is_behind_blocks_that_are_lost_while_tiers_are_asked_is_not_fetched():
    async def scenario(world: World) -> None:
        compute(world, [*PROMPT[:8], 3])
        request = world.a_request(PROMPT)
        in_tier(world, request)
        world.begin(request)
        await asyncio.sleep(0)
        for number in range(3):
            compute(world, [number] * 27)  # takes all blocks but one
        world.threads.run(0)  # which tells where the last two are
        await world.finish()
        assert world.num_from_tiers == 0

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=8)))


def test_what_the_device_has_stays_while_the_rest_is_fetched():
    async def scenario(world: World) -> None:
        compute(world, [*PROMPT[:8], 3])
        request = world.a_request(PROMPT)
        in_tier(world, request)
        world.begin(request)
        await until_fetching(world)
        compute(world, [9] * 15)  # takes all others
        world.threads.run(0)
        await world.finish()
        assert world.num_from_tiers == 2 * BLOCK_SIZE

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=8)))


@pytest.mark.parametrize("seed", [0, 1], ids=["of one process", "of a gang"])
def test_what_comes_for_a_request_that_is_over_is_held_by_nobody(seed: int):
    async def scenario(world: World) -> None:
        request, partition = world.a_request(PROMPT), world.num_partitions - 1
        process = world.process_of(partition)
        for name in request.block_names:
            process.tiers[1].kept[name] = np.array(world.right[name], np.int32).tobytes()
        world.begin(request, partition)
        for is_fetching in (False, True):
            await asyncio.sleep(0.001)
            assert len(process.threads.pending) == 1
            if is_fetching:
                world.cancel()
            process.threads.run(0)
            await asyncio.sleep(0.001)
            while process.coming:
                process.coming.popleft()()
        await world.finish()

    run_virtually(scenario(slow_to_compute(World(seed, num_partitions=3, num_blocks=16))))


def test_a_tier_that_seemed_slow_is_tried_out_beside_who_does_not_wait_for_it():
    async def scenario(world: World) -> None:
        world.times.computed(BLOCK_SIZE, 0.5)
        for _ in range(100):
            world.times.fetched("ssd", 4, 1000.0)
        request = world.a_request(PROMPT)
        in_tier(world, request)
        world.begin(request)
        await until_fetching(world)
        assert world.fetching.num_waiting == 0
        world.threads.run(0)
        await asyncio.sleep(0.001)
        fetch_s = world.times.fetch_s("ssd", 4)
        assert fetch_s is not None
        assert fetch_s < 1.0
        await world.finish()
        assert world.num_from_tiers == 0

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=16)))


# ---- where there is no room


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Of eight blocks. Time is virtual, and computing so slow that every fetch is worth it."""
    monkeypatch.setattr(fetching.time, "perf_counter", lambda: asyncio.get_running_loop().time())
    return slow_to_compute(World(0, num_partitions=1, num_blocks=8))


def slow_to_compute(world: World) -> World:
    for _ in range(100):
        world.times.computed(BLOCK_SIZE, 0.5)
    return world


def fill(world: World, num_tokens: int = 19) -> Request:
    """A request that runs, and has so many blocks that those of `PROMPT` find no room."""
    running = world.a_request([9] * num_tokens)
    world.scheduler.add(running, 0.0, None, 0)
    world.engine.launch()
    return running


async def ask(world: World, request: Request) -> None:
    """The request comes, and tiers have told what they have of it."""
    world.begin(request)
    await asyncio.sleep(0)
    world.threads.run(0)
    await asyncio.sleep(0.1)
    assert not world.threads.pending
    assert world.fetching.num_waiting == 0  # it is begun, and waits in the line


def serve(world: World, request: Request) -> None:
    while request.id not in world.engine.ended:
        world.engine.launch()
        world.complete()


async def until_its_turn(world: World, running: Request) -> None:
    """There is room, and what is fetched waits for a thread."""
    serve(world, running)
    world.engine.launch()
    await asyncio.sleep(0)
    assert len(world.threads.pending) == 1
    assert not world.engine.in_flight


def test_a_request_fetches_once_there_is_room_and_enters_before_who_came_later(world: World):
    async def scenario() -> None:
        running, request, later = fill(world), world.a_request(PROMPT), world.a_request([8] * 19)
        in_tier(world, request)
        await ask(world, request)
        world.scheduler.add(later, 0.0, None, 0)
        await until_its_turn(world, running)
        world.threads.run(0)
        await asyncio.sleep(0.001)
        assert world.num_from_tiers == 4 * BLOCK_SIZE
        serve(world, request)
        assert later.id not in world.engine.ended
        await world.finish()

    run_virtually(scenario())


def test_who_comes_later_takes_no_room_that_another_waits_for(world: World):
    async def scenario() -> None:
        running, first, request = fill(world), world.a_request([8] * 27), world.a_request(PROMPT[:9])
        in_tier(world, request)
        world.scheduler.add(first, 0.0, None, 0)
        await ask(world, request)  # there is room for it, and it fetches nothing yet
        serve(world, running)
        world.engine.launch()
        assert not world.threads.pending
        serve(world, first)
        await world.finish()
        assert world.num_from_tiers == 2 * BLOCK_SIZE

    run_virtually(scenario())


def test_of_requests_that_wait_alike_one_fetches_for_all(world: World):
    world = slow_to_compute(World(0, num_partitions=1, num_blocks=10))  # in which two of them find room

    async def scenario() -> None:
        running, requests = fill(world, 27), [world.a_request(PROMPT) for _ in range(3)]
        in_tier(world, requests[0])
        for request in requests:
            await ask(world, request)
        await until_its_turn(world, running)
        world.threads.run(0)
        await asyncio.sleep(0.001)
        world.engine.launch()
        await asyncio.sleep(0.001)
        assert [each.name for each in world.tiers if each.num_fetched] == ["ssd"]
        assert world.tiers[1].num_fetched == 4
        await world.finish()
        assert world.tiers[1].num_fetched == 4

    run_virtually(scenario())


def test_what_tiers_tell_late_is_of_use_to_a_request_that_has_to_wait(world: World):
    async def scenario() -> None:
        running, request = fill(world), world.a_request(PROMPT)
        in_tier(world, request)
        world.begin(request)
        await asyncio.sleep(1.0)
        assert world.fetching.num_waiting == 0
        world.threads.run(0)
        await asyncio.sleep(0.001)
        await until_its_turn(world, running)
        world.threads.run(0)
        await world.finish()
        assert world.num_from_tiers == 4 * BLOCK_SIZE

    run_virtually(scenario())


def lose_what_is_cached(world: World) -> None:
    """Others use all the blocks that nobody holds."""
    blocks = world.pool.allocate(0, world.pool.num_free(0))
    assert blocks is not None
    world.pool.release(0, blocks)


@pytest.mark.parametrize("num_on_device", [2, 4])
def test_what_the_device_loses_while_a_request_waits_is_fetched_with_the_rest(world: World, num_on_device: int):
    async def scenario() -> None:
        request = world.a_request(PROMPT)
        in_tier(world, request)
        compute(world, PROMPT[: num_on_device * BLOCK_SIZE + 1])
        running = fill(world, num_tokens=15)
        later = world.a_request([8] * 27)  # it waits for more room than there is, and the next one behind it
        world.scheduler.add(later, 0.0, None, 0)
        world.begin(request)
        await asyncio.sleep(0)
        while world.threads.pending:
            world.threads.run(0)
            await asyncio.sleep(0.01)
        assert world.fetching.num_waiting == 0
        assert world.num_from_tiers == 0
        world.scheduler.cancel(later.id)
        world.live.remove(later.id)
        lose_what_is_cached(world)
        await until_its_turn(world, running)
        world.threads.run(0)
        await world.finish()
        assert world.num_from_tiers == 4 * BLOCK_SIZE

    run_virtually(scenario())


def test_a_request_that_ends_while_it_is_brought_leaves_nothing(world: World):
    async def scenario() -> None:
        running, request = fill(world), world.a_request(PROMPT)
        in_tier(world, request)
        await ask(world, request)
        await until_its_turn(world, running)
        world.live.remove(request.id)
        world.scheduler.cancel(request.id)
        world.threads.run(0)
        await world.finish()
        assert world.pool.num_free(0) == 8

    run_virtually(scenario())


def test_a_request_whose_blocks_do_not_come_in_time_is_computed(world: World):
    async def scenario() -> None:
        running, request = fill(world), world.a_request(PROMPT)
        in_tier(world, request)
        await ask(world, request)
        await until_its_turn(world, running)
        await asyncio.sleep(10.0)  # and no thread takes it
        assert world.fetching.num_late == 1
        serve(world, request)
        await world.finish()
        assert world.num_from_tiers == 0

    run_virtually(scenario())


def test_a_request_that_ended_before_its_turn_is_forgotten(world: World):
    async def scenario() -> None:
        running, request = fill(world), world.a_request(PROMPT)
        in_tier(world, request)
        await ask(world, request)
        world.live.remove(request.id)
        world.scheduler.cancel(request.id)
        world.fetching.tick()
        serve(world, running)
        assert not world.fetching.bring_now(request.id)
        await world.finish()
        assert world.tiers[1].num_fetched == 0

    run_virtually(scenario())


def test_who_has_waited_in_vain_for_what_another_fetches_does_not_wait_as_long_again(world: World):
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        first, second = world.a_request(PROMPT), world.a_request(PROMPT)
        in_tier(world, first)
        began_s = loop.time()
        world.begin(first)
        await until_fetching(world)  # and no thread takes it
        world.begin(second)
        while world.fetching.num_waiting:
            await asyncio.sleep(0.01)
            for index, (running, _) in reversed(list(enumerate(world.threads.pending))):
                if index or running.cancelled():  # the second one's look-up
                    world.threads.run(index)
        both_s = world.times.compute_s(2 * len(PROMPT))  # the first one is computed before the second by now
        assert both_s is not None
        assert loop.time() - began_s < 1.2 * both_s
        await world.finish()

    run_virtually(scenario())
