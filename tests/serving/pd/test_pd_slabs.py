"""Slabs hold nothing longer than a handoff needs, however it ends."""

import asyncio
from typing import Any

import pytest

from moonshard.kv.transfer import Transport
from moonshard.serving.worker.worker import Worker
from tests.engine_room import long_text
from tests.serving.pd.pd_pair import Pair, kv_plane, run, running, until_as_it_began

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.timeout(120)]


def holds_nothing(worker: Worker) -> bool:
    return not kv_plane(worker)._slab.bytes.any()


async def assert_nothing_is_left(pair: Pair) -> None:
    for worker in (pair.prefill, pair.decode):
        await until_as_it_began(worker)
        assert holds_nothing(worker)


async def test_after_a_handoff_neither_slab_holds_any_of_it():
    async with running() as pair:
        plane, written = kv_plane(pair.decode), list[bool]()
        copy_out = plane.copy_out

        async def seen(*what: Any, **named: Any) -> str | None:
            written.append(not holds_nothing(pair.decode))
            return await copy_out(*what, **named)

        plane.copy_out = seen
        answer = await pair.ask(run(long_text(300), 4))
        assert answer.cause is None
        assert written
        assert all(written)
        await assert_nothing_is_left(pair)


async def test_after_handoffs_that_were_given_up_at_any_moment_neither_slab_holds_any_of_them():
    async with running(quarantine_s=0.05) as pair:
        for num_rounds in range(0, 40, 2):
            each = run(long_text(100, seed=num_rounds), 8)
            answer = pair.begin(each)
            for _ in range(num_rounds):
                await asyncio.sleep(0.001)
            pair.cancel(each)
            await answer.is_over.wait()
        await assert_nothing_is_left(pair)


async def test_after_writes_that_failed_and_blocks_that_were_damaged_neither_slab_holds_any_of_them():
    async with running(quarantine_s=0.05) as pair:

        def damage(message, link, forward=pair.to_decode):
            if message.WhichOneof("message") in ("landed", "start"):
                manifest = message.landed if message.HasField("landed") else message.start.last
                manifest.checksums[:] = [one ^ 1 for one in manifest.checksums]
            forward(message, link)

        pair.to_decode = damage
        assert (await pair.ask(run(long_text(100), 8))).cause is not None
        pair.to_decode = pair.decode.receive
        transport: Transport = kv_plane(pair.decode)._transport
        transport.close()
        assert (await pair.ask(run(long_text(100, seed=1), 8))).cause is not None
        await assert_nothing_is_left(pair)
