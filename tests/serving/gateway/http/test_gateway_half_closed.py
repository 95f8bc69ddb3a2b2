"""A client that has sent all it has to say gets its answer, as RFC 9112 (9.6) wants; one that left is still noticed."""

import asyncio
import json

import httpx
import pytest

from moonshard.serving.gateway.http.connections import half_closed
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens
from tests.serving.gateway.raw_http import connected, post
from tests.serving.gateway.sse import events_of, tokens_of

ASKED = {"model": "kimi", "prompt": [1, 2], "max_tokens": 4, "return_token_ids": True}


@pytest.fixture
def keep_alive_s() -> float:
    """A stream begins before its first token, so that bytes ahead of a chunk are seen too."""
    return 0.03


async def answer_of(running: RunningGateway, worker: FakeWorker, request: bytes) -> httpx.Response:
    """The answer to a client that ends its side before the first token, and waits for some of the gateway's probes."""
    worker.script.may_step.clear()
    async with connected(running) as raw:
        await raw.send(request)
        await worker.run_seen.wait()
        raw.writer.write_eof()
        begun = await raw.reader.readexactly(3)
        worker.script.may_step.set()
        return parsed(begun + await raw.reader.read())


def parsed(data: bytes) -> httpx.Response:
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    if headers.get("transfer-encoding") == "chunked":
        body = dechunked(body)
    assert lines[0] == "HTTP/1.1 200 OK"
    return httpx.Response(200, content=body)


def dechunked(data: bytes) -> bytes:
    """As RFC 9112 (7.1) has it: sizes may begin with zeros, and a size of zeros is the last."""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        if int(size, 16) == 0:
            assert data == b"\r\n"
            return body
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_whole_answer_reaches_a_half_closed_client(running: RunningGateway, worker: FakeWorker, version: str):
    answer = await answer_of(running, worker, post("/v1/completions", ASKED, version=version))
    assert answer.json()["choices"][0]["token_ids"] == expected_tokens([1, 2], 4)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_stream_reaches_a_half_closed_client(running: RunningGateway, worker: FakeWorker, version: str):
    answer = await answer_of(running, worker, post("/v1/completions", ASKED | {"stream": True}, version=version))
    events = [part for part in answer.text.split("\n\n") if not part.startswith(":")]
    assert tokens_of(events_of("\n\n".join(events))) == expected_tokens([1, 2], 4)


async def test_both_of_two_requests_sent_at_once_are_answered(running: RunningGateway, worker: FakeWorker):
    async with connected(running) as raw:
        worker.script.may_step.clear()
        await raw.send(post("/v1/completions", ASKED) + post("/v1/completions", ASKED | {"prompt": [3]}))
        await worker.run_seen.wait()
        raw.writer.write_eof()
        worker.script.may_step.set()
        answers = [await raw.answer(), await raw.answer()]
        assert await raw.reader.read() == b""
    assert [answer.status for answer in answers] == [200, 200]


@pytest.mark.parametrize(
    "begin", [b"GET /hea", b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1"]
)
async def test_a_client_that_ends_within_its_request_is_not_waited_for(running: RunningGateway, begin: bytes):
    async with connected(running) as raw:
        await raw.send(begin)
        raw.writer.write_eof()
        assert await raw.reader.read() == b""


@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_that_ended_its_side_and_leaves_later_is_noticed(
    running: RunningGateway, worker: FakeWorker, is_stream: bool
):
    worker.script.may_step.clear()
    async with connected(running) as raw:
        await raw.send(post("/v1/completions", ASKED | {"stream": is_stream}))
        await worker.run_seen.wait()
        raw.writer.write_eof()
        await raw.reader.readexactly(1)
    await asyncio.wait_for(worker.cancel_seen.wait(), 10)
    await asyncio.wait_for(running.gateway.wait_idle(), 10)


async def test_a_client_that_ends_within_its_second_request_has_its_first_answer_and_nothing_more(
    running: RunningGateway, worker: FakeWorker
):
    """Not a byte of an answer to the second, which would be read as one, and no wait for the rest of it."""
    worker.script.may_step.clear()
    async with connected(running) as raw, asyncio.timeout(10):
        await raw.send(post("/v1/completions", ASKED) + post("/tokenize", {"prompt": "x"})[:-1])
        await worker.run_seen.wait()
        raw.writer.write_eof()
        begun = await raw.reader.readexactly(3)
        worker.script.may_step.set()
        rest = begun + await raw.reader.read()
    head, _, body = rest.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(body)["choices"][0]["token_ids"] == expected_tokens([1, 2], 4)


async def test_whoever_is_silent_long_enough_for_all_probes_still_gets_an_answer(
    running: RunningGateway, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """They are fewer bytes than any answer begins with."""
    monkeypatch.setattr(half_closed, "GROWTH", 1)
    worker.script.may_step.clear()
    async with connected(running) as raw, asyncio.timeout(10):
        await raw.send(post("/v1/completions", ASKED))
        await worker.run_seen.wait()
        raw.writer.write_eof()
        begun = await raw.reader.readexactly(half_closed.NUM_PROBES)
        worker.script.may_step.set()
        answer = parsed(begun + await raw.reader.read())
    assert answer.json()["choices"][0]["token_ids"] == expected_tokens([1, 2], 4)
