"""Long work runs off the event loop, in turn, and is not begun for a client that has left."""

import asyncio
import threading

import pytest

from moonshard.serving.gateway.aside import MAX_INLINE_SIZE, Aside

LONG = MAX_INLINE_SIZE + 1


async def test_short_work_is_done_here_and_long_work_elsewhere():
    aside, here = Aside(), threading.get_ident()
    assert await aside.run(MAX_INLINE_SIZE, threading.get_ident) == here
    assert await aside.run(LONG, threading.get_ident) != here


async def test_what_it_raises_comes_back():
    with pytest.raises(ZeroDivisionError):
        await Aside().run(LONG, lambda: 1 / 0)


async def test_work_cancelled_while_it_waits_is_never_done():
    aside, may_end, done = Aside(), threading.Event(), []
    first = asyncio.ensure_future(aside.run(LONG, may_end.wait))
    abandoned = asyncio.ensure_future(aside.run(LONG, done.append, "abandoned"))
    last = asyncio.ensure_future(aside.run(LONG, done.append, "last"))
    await asyncio.sleep(0)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    may_end.set()
    await asyncio.gather(first, last)
    assert done == ["last"]
