"""Whatever hangs in a tier, few calls hang with it, and little waits behind them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from moonshard.serving.worker.store.threads import HANGING_S, MAX_BEHIND, MAX_HANGING, MAX_PENDING, TierThreads


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.fixture
async def threads(clock: Clock) -> AsyncIterator[TierThreads]:
    made = TierThreads(clock)
    yield made
    made.close()


@contextmanager
def hanging() -> Iterator[threading.Event]:
    """An event that calls wait for, set at the end."""
    may_go = threading.Event()
    try:
        yield may_go
    finally:
        may_go.set()


def wait_for(event: threading.Event) -> None:
    event.wait()


async def test_what_is_asked_comes_back(threads: TierThreads):
    asked = threads.ask(divmod, 7, 2)
    assert await asked.within(30)
    assert asked.future.result() == (3, 1)
    assert await threads.write(divmod, 9, 2) == (4, 1)


async def test_nothing_is_asked_of_threads_that_all_hang_and_again_once_one_comes_back(
    threads: TierThreads, clock: Clock
):
    with hanging() as may_go:
        asked = [threads.ask(may_go.wait) for _ in range(MAX_HANGING)]
        assert not threads.is_full
        clock.now_s += HANGING_S + 0.1
        assert threads.is_full
        assert not await asked[0].within(0.01)
    for each in asked:
        assert await each.within(30)
    assert not threads.is_full


async def test_no_more_than_so_many_wait_for_a_thread_and_who_gives_up_is_never_run(threads: TierThreads):
    ran = list[int]()
    with hanging() as may_go:
        asked = [threads.ask(may_go.wait) for _ in range(MAX_HANGING)]
        late = [threads.ask(ran.append, number) for number in range(MAX_PENDING - MAX_HANGING)]
        assert threads.is_full
        assert all(each.give_up() for each in late)
    for each in asked:
        assert await each.within(30)
    await asyncio.sleep(0)
    assert ran == []
    assert not threads.is_full


async def test_what_nobody_waits_for_is_left_out_where_too_much_waits(threads: TierThreads):
    ran = list[int]()
    with hanging() as may_go:
        threads.write_behind(partial(wait_for, may_go))
        for number in range(3 * MAX_BEHIND):
            threads.write_behind(partial(ran.append, number))
    await threads.write(lambda: None)  # behind all that was taken
    assert ran == list(range(MAX_BEHIND - 1))


async def test_once_closed_nothing_more_is_taken(threads: TierThreads):
    threads.close()
    assert threads.is_full
    threads.write_behind(lambda: None)
