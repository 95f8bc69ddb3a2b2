"""A client that leaves during a handoff: both workers hear of it at once, and nothing is held afterwards."""

import asyncio
import contextlib

import httpx
import pytest

from moonshard.rpc.client import AsyncClient
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import (
    PROMPT,
    Form,
    ask,
    assert_nothing_left,
    decode_worker,
    fleet,
    prefill_worker,
    until,
)

STAGES = (
    ("prefill", "chunk 0"),
    ("prefill", "chunk 1"),
    ("prefill", "first_tokens"),
    ("prefill", "last_chunk"),
    ("decode", "land 1"),
    ("decode", "start"),
    ("decode", "step 3"),
)


@pytest.mark.parametrize("form", ["http stream", "http whole", "grpc"])
@pytest.mark.parametrize(("role", "point"), STAGES)
async def test_both_workers_hear_that_the_client_left(form: Form, role: str, point: str):
    prefill, decode = prefill_worker(), decode_worker()
    holder = prefill if role == "prefill" else decode
    holder.script.points.hold(point)
    async with fleet(prefill, decode) as running:
        asking = asyncio.create_task(ask(running, form))
        await holder.script.points.reached(point)
        await _leave(asking)
        await prefill.cancel_seen.wait()
        await decode.cancel_seen.wait()
        (handoff,) = (reserve.run.request_id for reserve in decode.reserves)
        assert decode.cancelled == [handoff]
        assert set(prefill.cancelled) == {handoff}  # told again for what was on its way
        await running.gateway.wait_idle()
        await until(lambda: not (prefill.num_running or decode.num_running or decode.leases))
        assert_nothing_left(running)


async def test_a_prefill_worker_that_was_not_asked_yet_hears_nothing():
    prefill, decode = prefill_worker(), decode_worker()
    decode.script.points.hold("target")
    async with fleet(prefill, decode) as running:
        asking = asyncio.create_task(ask(running, "grpc"))
        await decode.script.points.reached("target")
        await _leave(asking)
        await until(lambda: bool(decode.cancelled and decode.drained))
        await running.gateway.wait_idle()
        assert (prefill.runs, prefill.cancelled) == ([], [])
        assert_nothing_left(running)


@pytest.mark.parametrize("holder", ["prefill", "decode"])
async def test_three_hundred_requests_cancelled_before_their_first_token_leave_nothing(holder: str):
    prefill, decode = prefill_worker(), decode_worker()
    (prefill if holder == "prefill" else decode).script.points.hold("chunk 0", "target")
    async with fleet(prefill, decode) as running, AsyncClient(running.grpc) as client:
        calls = [asyncio.create_task(client.generate(PROMPT)) for _ in range(300)]
        legs = prefill.runs if holder == "prefill" else decode.reserves
        await until(lambda: len(legs) == 300)
        assert running.gateway.handoffs.num_handoffs == 300
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await running.gateway.wait_idle()
        await until(lambda: not (prefill.num_running or decode.num_running or decode.leases))
        assert_nothing_left(running)
        assert len(decode.cancelled) == 300


async def test_a_client_that_leaves_while_its_request_waits_for_another_worker():
    decode = decode_worker()
    decode.script.points.hold("step 2")
    async with fleet(decode, failover_wait_s=60) as running:
        asking = asyncio.create_task(ask(running, "grpc"))
        await decode.script.points.reached("step 2")
        decode.die()
        await running.gateway.pool.wait_not_ready()
        await _leave(asking)
        await running.gateway.wait_idle()
        assert_nothing_left(running)


async def test_a_client_that_leaves_after_its_request_went_on_elsewhere_ends_it_there():
    workers = [FakeWorker(epoch=b"1" * 16), FakeWorker(epoch=b"2" * 16)]
    for worker in workers:
        worker.script.points.hold("step 2")
    async with fleet(*workers) as running:
        asking = asyncio.create_task(ask(running, "http stream"))
        await until(lambda: any(worker.runs for worker in workers))
        first = next(worker for worker in workers if worker.runs)
        second = next(worker for worker in workers if worker is not first)
        await first.script.points.reached("step 2")
        first.die()
        await second.script.points.reached("step 2")
        await _leave(asking)
        await second.cancel_seen.wait()
        assert second.cancelled == [second.runs[0].request_id]
        await until(lambda: not second.num_running)
        await running.gateway.wait_idle()
        assert_nothing_left(running)


async def _leave(asking: asyncio.Task) -> None:
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await asking
