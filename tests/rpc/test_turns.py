"""Whose message is waited for: so many at once, in the order in which they came, and none for ever."""

import asyncio

import pytest

from moonshard.rpc.status import RequestTimeout
from moonshard.rpc.turns import Turns

FOREVER_S = 60.0


async def hold(turns: Turns, begun: asyncio.Event, until: asyncio.Event) -> None:
    async with turns.turn():
        begun.set()
        await until.wait()


async def test_no_more_than_may_are_within_at_once_and_all_come_to_their_turn():
    turns, within, most, names = Turns(3, patience_s=FOREVER_S, hurried_s=FOREVER_S), 0, 0, []

    async def once(name: int) -> None:
        nonlocal within, most
        async with turns.turn():
            within, most = within + 1, max(most, within + 1)
            names.append(name)
            await asyncio.sleep(0)
            within -= 1

    await asyncio.gather(*map(once, range(20)))
    assert (names, most) == (list(range(20)), 3)


async def test_a_slow_one_gives_way_once_another_waits():
    turns, begun, never = Turns(1, patience_s=FOREVER_S, hurried_s=0), asyncio.Event(), asyncio.Event()
    slow = asyncio.create_task(hold(turns, begun, never))
    await begun.wait()
    async with asyncio.timeout(10), turns.turn():
        pass
    with pytest.raises(RequestTimeout):
        await slow


async def test_a_slow_one_has_as_long_as_it_may_while_nobody_waits():
    turns = Turns(1, patience_s=0.01, hurried_s=0)
    with pytest.raises(RequestTimeout):
        await asyncio.wait_for(hold(turns, asyncio.Event(), asyncio.Event()), 10)
    turns, done = Turns(1, patience_s=FOREVER_S, hurried_s=0), asyncio.Event()
    done.set()
    await hold(turns, asyncio.Event(), done)


async def test_whoever_leaves_the_line_or_its_turn_takes_no_place_along():
    turns, begun, never = Turns(1, patience_s=FOREVER_S, hurried_s=FOREVER_S), asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(hold(turns, begun, never)) for _ in range(3)]
    await begun.wait()
    for task in reversed(tasks):
        task.cancel()
    await asyncio.wait(tasks)
    async with asyncio.timeout(10), turns.turn():
        pass


async def test_an_error_of_the_block_is_its_own():
    turns = Turns(1, patience_s=FOREVER_S, hurried_s=FOREVER_S)
    with pytest.raises(TimeoutError, match="another's"):
        async with turns.turn():
            raise TimeoutError("another's")
