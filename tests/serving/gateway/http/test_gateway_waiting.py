"""Connections whose client keeps them waiting are closed, by time or when too many; a request in flight never is."""

import asyncio
import contextlib
from contextlib import AsyncExitStack
from dataclasses import replace

import httpx
import pytest

from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.http.connections import protocol as http_protocol
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens
from tests.serving.gateway.raw_http import Raw, connected, post
from tests.serving.gateway.sse import events_of, tokens_of

ASKED = {"model": "kimi", "prompt": [1, 2], "max_tokens": 4, "return_token_ids": True}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY_TO_COME = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
SHORT_S = 0.05
AMPLE_S = 0.5  # for a request that is sent in one piece, also on a machine that does something else
NO_REQUEST = {"head_timeout_s": SHORT_S, "body_timeout_s": SHORT_S}
NO_FURTHER_REQUEST = {"keep_alive_s": SHORT_S}
NOTHING_WAITS = {"keep_alive_s": AMPLE_S, "head_timeout_s": AMPLE_S, "body_timeout_s": AMPLE_S}
MAX_WAITING = 3


@pytest.fixture
def gateway_config(request: pytest.FixtureRequest, gateway_config: GatewayConfig) -> GatewayConfig:
    return replace(gateway_config, **request.param)


def keys(**changes: float) -> pytest.MarkDecorator:
    """Of [gateway], for one test."""
    return pytest.mark.parametrize("gateway_config", [changes], indirect=True, ids=["keys"])


async def drip(raw: Raw, data: bytes) -> None:
    """A little now and then, for as long as anybody takes it."""
    with contextlib.suppress(ConnectionError):
        while True:
            await raw.send(data)
            await asyncio.sleep(SHORT_S / 10)


@keys(**NO_REQUEST)
@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (b"GET /", "head"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ", "head"),
        (BODY_TO_COME, "body"),
    ],
)
async def test_a_request_that_comes_byte_by_byte_is_given_up(running: RunningGateway, begin: bytes, what: str):
    async with connected(running) as raw:
        await raw.send(begin)
        dripping = asyncio.create_task(drip(raw, b"x"))
        answer = await raw.answer()
        dripping.cancel()
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert answer.error["code"] == "request_timeout"
    assert answer.error["message"] == f"the {what} took too long to arrive"
    assert running.gateway.num_running == 0


@keys(**NO_REQUEST)
async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word(running: RunningGateway):
    async with connected(running) as raw:
        assert await raw.reader.read() == b""


@keys(**NO_FURTHER_REQUEST)
@pytest.mark.parametrize("kept_by", [b"", b"\r\n"], ids=["silence", "line ends"])
async def test_an_idle_connection_is_closed_without_a_word(running: RunningGateway, kept_by: bytes):
    async with connected(running) as raw:
        await raw.send(HEALTH)
        assert (await raw.answer()).status == 200
        dripping = asyncio.create_task(drip(raw, kept_by))
        with contextlib.suppress(ConnectionError):
            assert await raw.reader.read() == b""
        dripping.cancel()


@keys(**NOTHING_WAITS)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_in_flight_outlasts_every_timeout(
    running: RunningGateway, http: httpx.AsyncClient, worker: FakeWorker, is_stream: bool
):
    worker.script.may_step.clear()
    asking = asyncio.create_task(http.post("/v1/completions", json=ASKED | {"stream": is_stream}))
    await worker.run_seen.wait()
    async with connected(running) as other:  # for which all timeouts pass meanwhile
        assert await other.reader.read() == b""
    worker.script.may_step.set()
    answer = await asking
    tokens = tokens_of(events_of(answer.text)) if is_stream else answer.json()["choices"][0]["token_ids"]
    assert tokens == expected_tokens([1, 2], 4)


@keys(head_timeout_s=AMPLE_S)
async def test_what_follows_a_request_in_flight_does_not_cut_its_answer(running: RunningGateway, worker: FakeWorker):
    for junk in (b"\0\0 garbage\r\n\r\n", b"GET /unfinished"):
        worker.script.may_step.clear()
        worker.run_seen.clear()
        async with connected(running) as raw, connected(running) as other:
            await raw.send(post("/v1/completions", ASKED) + junk)
            await worker.run_seen.wait()
            assert await other.reader.read() == b""  # all timeouts have passed
            worker.script.may_step.set()
            answer = await raw.answer()
            assert answer.status == 200
            rest = await raw.reader.read()
            assert rest == b"" or rest.startswith(b"HTTP/1.1 408")


@keys()
async def test_a_connection_goes_on_after_the_rest_of_a_body_that_was_refused(running: RunningGateway):
    async with connected(running) as raw:
        await raw.send(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n\r\n1234")
        assert (await raw.answer()).status == 404
        await raw.send(b"5678" + HEALTH)  # the rest, and the connection goes on
        assert (await raw.answer()).status == 200


@keys(max_half_open_connections=MAX_WAITING, max_idle_connections=MAX_WAITING)
@pytest.mark.parametrize(
    ("sent", "last_word"),
    [
        (b"", b""),
        (b"GET /", b"HTTP/1.1 503"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1", b"HTTP/1.1 503"),
        (HEALTH, b""),
    ],
    ids=["nothing", "half a head", "half a body", "a request"],
)
async def test_the_oldest_that_waits_gives_way_to_one_too_many(running: RunningGateway, sent: bytes, last_word: bytes):
    async with AsyncExitStack() as stack:
        raws: list[Raw] = []
        for _ in range(MAX_WAITING + 1):
            raws.append(await stack.enter_async_context(connected(running)))
            await raws[-1].send(sent)
            if sent == HEALTH:
                assert (await raws[-1].answer()).status == 200
        assert (await raws[0].reader.read()).startswith(last_word)
        for raw in raws[1:]:
            if sent != HEALTH:
                continue
            await raw.send(HEALTH)
            assert (await raw.answer()).status == 200


@keys(max_half_open_connections=1, max_idle_connections=1)
async def test_requests_in_flight_do_not_count_and_do_not_give_way(running: RunningGateway, worker: FakeWorker):
    worker.script.may_step.clear()
    async with AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(connected(running))]
        for number in range(1, 5):
            await raws[-1].send(post("/v1/completions", ASKED))
            await worker.seen(number)
            raws.append(await stack.enter_async_context(connected(running)))
        worker.script.may_step.set()
        for raw in raws[:-1]:
            assert (await raw.answer()).status == 200


@keys(body_timeout_s=SHORT_S)
async def test_a_body_that_keeps_coming_has_the_time_it_needs(running: RunningGateway):
    request = post("/v1/completions", ASKED | {"stop": [" " * 900] * 16})
    padded = request.replace(b"Content-Length: ", b"Content-Length: 1") + b" " * 10**5
    assert padded.count(b"Content-Length: 1") == 1
    async with connected(running) as raw, connected(running) as slow:
        await raw.send(padded[: len(request)])  # over 8 KiB: at least a second more
        await slow.send(BODY_TO_COME)
        assert (await slow.answer()).status == 408
        await raw.send(padded[len(request) :])
        assert (await raw.answer()).status == 200


@keys()
async def test_what_is_left_of_a_body_that_was_refused_is_not_waited_for_long(
    running: RunningGateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_protocol, "LINGER_S", SHORT_S)
    async with connected(running) as raw:
        await raw.send(BODY_TO_COME.replace(b"/v1/completions", b"/nowhere"))
        assert (await raw.answer()).status == 404
        dripping = asyncio.create_task(drip(raw, b"x"))
        with contextlib.suppress(ConnectionError):
            assert await raw.reader.read() == b""
        dripping.cancel()
