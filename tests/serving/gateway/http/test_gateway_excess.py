"""A request with too much of anything is refused for that, and the requests of others are answered meanwhile."""

import asyncio
import contextlib
import json

import httpx
import pytest

from moonshard.rpc.codec import whole_calls
from moonshard.rpc.status import MAX_MESSAGE_BYTES, Unavailable
from moonshard.rpc.types import ToolCallPart
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.http.connections.protocol import MAX_HEAD_BYTES, MAX_PIPELINED
from moonshard.serving.gateway.intake.bounds import MAX_OTHER_VALUES, Bounds
from moonshard.serving.gateway.intake.json_marks import contents_of
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.raw_http import Raw, connected, post

ASKED = {"prompt": [1, 2, 3], "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def gateway_config() -> GatewayConfig:
    return GatewayConfig(port=0, grpc_port=0, drain_timeout_s=5)


def chunked(content: bytes) -> bytes:
    return CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(content), content)


async def test_what_follows_the_chunks_of_a_body_is_bounded_as_a_head_is(running: RunningGateway, worker: FakeWorker):
    async with connected(running) as raw, asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):  # its answer may be lost, as it is not read before all is sent
            await raw.send(chunked(json.dumps(ASKED).encode()) + b"a: b\r\n" * MAX_HEAD_BYTES)
            assert (await raw.answer()).status == 400
            assert not await raw.reader.read()
    assert worker.runs == []


async def test_a_few_lines_there_change_nothing(running: RunningGateway):
    async with connected(running) as raw, asyncio.timeout(20):
        await raw.send(chunked(json.dumps(ASKED).encode()) + b"Authorization: Bearer x\r\n\r\n")
        assert (await raw.answer()).status == 200


async def test_more_requests_than_may_wait_on_a_connection_end_it_after_those(running: RunningGateway):
    async with connected(running) as raw, asyncio.timeout(20):
        await raw.send(HEALTH * 2_000)
        assert await statuses(raw) == [200] * (MAX_PIPELINED + 1)


async def test_as_many_as_may_wait_are_answered(running: RunningGateway):
    async with connected(running) as raw, asyncio.timeout(20):
        await raw.send(HEALTH * MAX_PIPELINED + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert await statuses(raw) == [200] * (MAX_PIPELINED + 1)


async def statuses(raw: Raw) -> list[int]:
    """Of all answers until the connection ends."""
    found: list[int] = []
    try:
        while True:
            found.append((await raw.answer()).status)
    except asyncio.IncompleteReadError:
        return found


@pytest.mark.parametrize(
    "gateway_config", [GatewayConfig(port=0, grpc_port=0, max_body_bytes=1 << 20, max_bytes_in_flight=1 << 20)]
)
async def test_bytes_that_were_only_announced_are_not_in_flight(http: httpx.AsyncClient, running: RunningGateway):
    async with connected(running) as raw:
        await raw.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048000\r\n\r\n{")
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [{"role": "\x7f" * 100_000, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]},
        CHAT | {"model": "m" * 100_000},
    ],
)
async def test_a_refusal_repeats_no_more_of_a_request_than_a_reader_needs(asked: object, http: httpx.AsyncClient):
    response = await http.post("/v1/chat/completions", json=asked)
    assert response.status_code in (400, 404)
    assert len(response.json()["error"]["message"].encode()) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize("fault", [b'"\xff":1', b'"audio":"\xff"', b'"cache_salt":1e999'])
async def test_what_is_no_json_is_said_wherever_it_stands(fault: bytes, http: httpx.AsyncClient):
    body = json.dumps(CHAT).encode()[:-1] + b"," + fault + b"}"
    response = await http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("value", [b'"\xff"', b"1e999"])
async def test_a_field_that_is_not_served_is_named_whatever_it_holds(value: bytes, http: httpx.AsyncClient):
    body = json.dumps(CHAT).encode()[:-1] + b',"cache_salt":' + value + b"}"
    response = await http.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


async def test_a_port_of_many_digits_is_refused_in_openais_shape(running: RunningGateway):
    async with connected(running) as raw:
        await raw.send(post("/v1/completions", ASKED).replace(b"localhost", b"localhost:" + b"9" * 5_000))
        answer = await raw.answer()
        assert (answer.status, answer.error["type"]) == (403, "invalid_request_error")


def test_many_ids_may_come_again_while_no_worker_has_told_its_context():
    bounds = Bounds(max_body_bytes=1 << 25, max_context_tokens=None, max_token_bytes=None)
    with pytest.raises(Unavailable):
        bounds.check_contents(contents_of(b'{"prompt":[' + b"1000," * (2 * MAX_OTHER_VALUES) + b"1]}"))


def test_a_call_of_many_parts_is_their_sum():
    parts = [
        ToolCallPart(index=0, id="a", name="f", arguments="{"),
        *(ToolCallPart(index=0, arguments="x") for _ in range(9)),
    ]
    other = ToolCallPart(index=1, id="b", name="g", arguments="{}")
    assert [call.arguments for call in whole_calls([*parts, other])] == ["{" + "x" * 9, "{}"]
