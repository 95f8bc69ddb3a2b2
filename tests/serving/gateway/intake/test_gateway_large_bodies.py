"""A large body means what a small one does, though another process decodes it, and a fault there is its own."""

import asyncio
import sys
import threading

import httpx
import msgspec
import pytest

from moonshard.rpc.status import InternalError, InvalidArgument
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.intake import large_bodies
from moonshard.serving.gateway.intake.large_bodies import LARGE_BYTES, LargeBodies
from moonshard.serving.gateway.openai.body import BodyDecoder
from moonshard.serving.gateway.openai.requests import ChatBody, CompletionBody
from tests.serving.gateway.fake_worker import FakeWorker

LONG = 'Kimi \u6708\u4e4b\u6697\u9762 \\ "' * (LARGE_BYTES // 20)
CHATS = {
    "text": {"messages": [{"role": "user", "content": LONG}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}], "temperature": 0},
    "a tool": {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
    "unknown fields": {"messages": [{"role": "user", "content": "a", "mood": LONG}], "colour": 1},
}


@pytest.fixture
def gateway_config() -> GatewayConfig:
    return GatewayConfig(port=0, grpc_port=0, drain_timeout_s=5)


@pytest.mark.parametrize("asked", CHATS.values(), ids=CHATS.keys())
async def test_it_is_decoded_as_it_would_be_here(asked: object):
    decoder, body = BodyDecoder(ChatBody), msgspec.json.encode(asked)
    assert len(body) > LARGE_BYTES
    assert await LargeBodies().decode(decoder, body) == decoder.decode(body)


@pytest.mark.parametrize("fault", [b'{"prompt":"%b","max_tokens":"many"}', b'{"prompt":"%b"', b'{"prompt":"%b\xff"}'])
async def test_what_is_wrong_with_it_is_said_as_it_would_be_here(fault: bytes):
    decoder, body = BodyDecoder(CompletionBody), fault % (b"a" * LARGE_BYTES)
    with pytest.raises(InvalidArgument) as here:
        decoder.decode(body)
    with pytest.raises(InvalidArgument) as apart:
        await LargeBodies().decode(decoder, body)
    assert (apart.value.message, apart.value.field) == (here.value.message, here.value.field)


async def test_a_process_that_ends_early_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch):
    bodies, body = LargeBodies(), msgspec.json.encode({"prompt": "a" * LARGE_BYTES})
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        for _ in range(large_bodies.MAX_AT_ONCE + 1):  # room is given back
            with pytest.raises(InternalError):
                await bodies.decode(BodyDecoder(CompletionBody), body)
    found, _ = await bodies.decode(BodyDecoder(CompletionBody), body)
    assert found.prompt == "a" * LARGE_BYTES


async def test_who_leaves_while_others_are_decoded_is_not(monkeypatch: pytest.MonkeyPatch):
    begun, may_end = threading.Semaphore(0), threading.Event()

    def held(struct: type, body: bytes) -> tuple[object, list[str]]:
        begun.release()
        may_end.wait(30)
        return (struct, body), []

    monkeypatch.setattr(large_bodies, "_decode_apart", held)
    bodies, decoder = LargeBodies(), BodyDecoder(CompletionBody)
    first = [asyncio.ensure_future(bodies.decode(decoder, b"first")) for _ in range(large_bodies.MAX_AT_ONCE)]
    for _ in first:
        assert await asyncio.to_thread(begun.acquire, timeout=30)
    waiting = asyncio.ensure_future(bodies.decode(decoder, b"waiting"))
    left = first.pop()
    await asyncio.sleep(0)  # both tasks have begun
    for one in (waiting, left):
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
    last = asyncio.ensure_future(bodies.decode(decoder, b"last"))
    await asyncio.sleep(0)
    assert not begun.acquire(blocking=False)  # the one that was given up keeps its room to its end
    may_end.set()
    await asyncio.gather(*first, last)
    assert begun.acquire(blocking=False)
    assert not begun.acquire(blocking=False)


async def test_a_large_request_over_http_is_answered_and_its_fault_named(http: httpx.AsyncClient, worker: FakeWorker):
    asked = b'{"prompt":[1,2,3],"max_tokens":1,"colour":"' + b"a" * LARGE_BYTES + b'"}'
    response = await http.post("/v1/completions", content=asked)
    assert response.status_code == 200
    assert response.headers["x-moonshard-unknown-fields"] == "colour"
    refused = await http.post("/v1/completions", content=asked.replace(b'"max_tokens":1', b'"max_tokens":-1'))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"
