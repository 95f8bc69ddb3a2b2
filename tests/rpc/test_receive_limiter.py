"""Everybody's message is received at once; of too many the oldest have little time, and none has for ever."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from moonshard.rpc.server.receive_limiter import ReceiveLimiter
from moonshard.rpc.status import RequestTimeout

FOREVER_S = 60.0


class Message:
    """A message that is being received."""

    def __init__(self, limiter: ReceiveLimiter) -> None:
        self.is_here = asyncio.Event()
        self.receipt = asyncio.create_task(self._receive(limiter))

    async def _receive(self, limiter: ReceiveLimiter) -> None:
        async with limiter.receiving():
            await self.is_here.wait()


@contextlib.asynccontextmanager
async def on_their_way(limiter: ReceiveLimiter, num: int) -> AsyncIterator[list[Message]]:
    """The messages being received, the oldest first."""
    messages = [Message(limiter) for _ in range(num)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        yield messages
    for message in messages:
        message.receipt.cancel()
    await asyncio.gather(*(message.receipt for message in messages), return_exceptions=True)


async def test_of_more_than_may_be_slow_the_oldest_end_and_the_others_stay():
    async with on_their_way(ReceiveLimiter(2, timeout_s=FOREVER_S, hurried_timeout_s=0.01), 5) as messages:
        for message in messages[:3]:
            with pytest.raises(RequestTimeout):
                await message.receipt
        assert not any(message.receipt.done() for message in messages[3:])


async def test_a_burst_of_any_size_is_received():
    async with on_their_way(ReceiveLimiter(1, timeout_s=FOREVER_S, hurried_timeout_s=FOREVER_S), 200) as messages:
        for message in messages:
            message.is_here.set()
        await asyncio.gather(*(message.receipt for message in messages))


async def test_who_was_hurried_has_all_its_time_again_once_there_is_room():
    async with on_their_way(ReceiveLimiter(1, timeout_s=FOREVER_S, hurried_timeout_s=0.05), 2) as (old, new):
        new.is_here.set()
        await new.receipt
        await asyncio.sleep(0.1)  # longer than it would have had
        assert not old.receipt.done()
        old.is_here.set()
        await old.receipt


async def test_a_slow_one_has_as_long_as_it_may():
    async with on_their_way(ReceiveLimiter(2, timeout_s=0.05, hurried_timeout_s=0), 1) as (message,):
        await asyncio.sleep(0.01)
        assert not message.receipt.done()
        with pytest.raises(RequestTimeout):
            await message.receipt


async def test_whoever_leaves_makes_room():
    limiter = ReceiveLimiter(1, timeout_s=FOREVER_S, hurried_timeout_s=0)
    async with on_their_way(limiter, 1) as (left,):
        left.receipt.cancel()
        await asyncio.wait([left.receipt])
        async with on_their_way(limiter, 1) as (stays,):
            await asyncio.sleep(0.01)
            assert not stays.receipt.done()


async def test_an_error_of_the_block_is_its_own():
    limiter = ReceiveLimiter(1, timeout_s=FOREVER_S, hurried_timeout_s=FOREVER_S)
    with pytest.raises(TimeoutError, match="another's"):
        async with limiter.receiving():
            raise TimeoutError("another's")
