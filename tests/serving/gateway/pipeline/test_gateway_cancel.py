"""A client that leaves, at whatever stage, is noticed at once: its request ends at the worker too."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import DeadlineExceeded
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, FakeWorker

LONG = {"model": "kimi", "prompt": [1, 2], "max_tokens": MAX_CONTEXT_TOKENS - 2}
NOTICED_S = 5.0  # a bound for a hang, not a measure


@pytest.fixture(autouse=True)
async def leaves_nothing_behind(running: RunningGateway, worker: FakeWorker) -> AsyncIterator[None]:
    """After every test here: the request was cancelled at the worker, and the gateway holds nothing."""
    yield
    await asyncio.wait_for(worker.cancel_seen.wait(), NOTICED_S)
    await asyncio.wait_for(running.gateway.wait_idle(), NOTICED_S)
    assert worker.cancelled == [run.request_id for run in worker.runs]
    assert worker.finished == []
    pool = running.gateway.pool
    assert [pool.in_flight_tokens(link.address) for link in pool.links] == [0]
    assert [link.session.inboxes for link in pool.links if link.session] == [{}]


async def post_raw(running: RunningGateway, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = running.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode())
    writer.write(content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("is_stream", [False, True])
async def test_leaving_before_the_first_token(running: RunningGateway, worker: FakeWorker, is_stream: bool):
    worker.script.may_step.clear()
    _, writer = await post_raw(running, LONG | {"stream": is_stream})
    await worker.run_seen.wait()
    writer.close()


async def test_leaving_in_the_middle_of_a_stream(running: RunningGateway, worker: FakeWorker):
    worker.script.max_tokens_sent = 3
    reader, writer = await post_raw(running, LONG | {"stream": True})
    await reader.readuntil(b"data: ")  # one of two tokens: half a character alone is not told
    writer.close()


async def test_leaving_while_a_whole_answer_is_made(running: RunningGateway, worker: FakeWorker):
    worker.script.max_tokens_sent = 3
    _, writer = await post_raw(running, LONG)
    await worker.run_seen.wait()
    writer.close()


async def test_cancelling_a_grpc_call_before_its_first_token(grpc_client: AsyncClient, worker: FakeWorker):
    worker.script.may_step.clear()
    call = asyncio.create_task(grpc_client.generate([1, 2]))
    await worker.run_seen.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_cancelling_a_grpc_stream_in_the_middle(grpc_client: AsyncClient, worker: FakeWorker):
    worker.script.max_tokens_sent = 3
    async with grpc_client.stream([1, 2]) as stream:
        assert (await anext(aiter(stream))).token_ids


async def test_a_deadline_ends_the_call_and_the_work(running: RunningGateway, worker: FakeWorker):
    worker.script.may_step.clear()
    async with AsyncClient(running.grpc, timeout_s=0.5) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate([1, 2])


async def test_leaving_counts_as_an_abort(running: RunningGateway, worker: FakeWorker, http: httpx.AsyncClient):
    worker.script.may_step.clear()
    _, writer = await post_raw(running, LONG | {"n": 3})
    await worker.run_seen.wait()
    writer.close()
    await asyncio.wait_for(running.gateway.wait_idle(), NOTICED_S)
    metrics = (await http.get("/metrics")).text
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="kimi"} 3.0' in metrics
    assert 'moonshard_requests_total{outcome="cancelled"} 1.0' in metrics
