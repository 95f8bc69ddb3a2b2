"""A request's head is bounded, however it is sent; bodies and later requests on the connection do not count."""

import asyncio
import contextlib
import json

import pytest

from moonshard.serving.gateway.http.connections.protocol import MAX_HEAD_BYTES
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.conftest import MAX_BODY_BYTES

START = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
PART = 16 * 1024


async def connect(running: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = running.http.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (START, b"X: " + b"y" * PART + b"\r\n"),
        (START + b"X: ", b"y" * PART),
        (b"GET /", b"y" * PART),
    ],
    ids=["many headers", "one header", "the path"],
)
async def test_an_endless_head_is_cut_off(running: RunningGateway, start: bytes, part: bytes):
    reader, writer = await connect(running)
    writer.write(start)
    num_sent = 0
    with contextlib.suppress(ConnectionError):  # the answer may be lost to what was still being sent
        while num_sent < 100 * MAX_HEAD_BYTES and not reader.at_eof():
            writer.write(part)
            await writer.drain()
            num_sent += len(part)
        if num_sent < 100 * MAX_HEAD_BYTES:
            assert (await reader.read(64)).startswith(b"HTTP/1.1 400")
    assert num_sent < 100 * MAX_HEAD_BYTES
    writer.close()


async def test_bodies_and_later_requests_do_not_count(running: RunningGateway):
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    body += b" " * (MAX_BODY_BYTES - len(body))
    reader, writer = await connect(running)
    for _ in range(3):
        writer.write(START + b"X: " + b"y" * 50_000 + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
    writer.close()
