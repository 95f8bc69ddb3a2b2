"""Versions, methods and paths are handled as HTTP demands, whatever the request is about."""

import asyncio
import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import Iterator

import httpx
import pytest

from moonshard.rpc.status import TooLarge
from moonshard.serving.gateway.intake.body import Body
from moonshard.serving.gateway.intake.inflate import MAX_MEMBERS, PIECE_BYTES, Inflater
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.conftest import MAX_BODY_BYTES
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens
from tests.serving.gateway.raw_http import connected, post
from tests.serving.gateway.sse import events_of, tokens_of

ASKED = {"model": "kimi", "prompt": [1, 2], "max_tokens": 4, "return_token_ids": True}
BODY = json.dumps(ASKED).encode()


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


COMPRESSED = [
    ("gzip", gzip.compress(BODY)),
    ("GZip", gzip.compress(BODY)),
    ("x-gzip", gzip.compress(BODY)),
    ("gzip", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
    ("identity, gzip", gzip.compress(BODY)),
    ("deflate", zlib.compress(BODY)),
    ("deflate", raw_deflate(BODY)),
    ("identity", BODY),
    ("", BODY),
]
DAMAGED = [
    ("gzip", BODY),
    ("gzip", b""),
    ("gzip", gzip.compress(BODY)[:-1]),
    ("gzip", gzip.compress(BODY)[:-8] + bytes(8)),
    ("gzip", gzip.compress(BODY) + b"more"),
    ("gzip", gzip.compress(b"") * (MAX_MEMBERS + 1)),
    ("deflate", b""),
    ("deflate", b"x"),
    ("deflate", zlib.compress(BODY)[:-1]),
    ("deflate", zlib.compress(BODY) + b"more"),
    ("deflate", BODY),
]


async def compressed(http: httpx.AsyncClient, encoding: str, content: bytes | Iterator[bytes]) -> httpx.Response:
    return await http.post("/v1/completions", content=content, headers={"content-encoding": encoding})


async def test_a_compressed_body_means_what_it_holds(http: httpx.AsyncClient):
    for encoding, content in COMPRESSED:
        answer = await compressed(http, encoding, content)
        assert answer.status_code == 200, (encoding, answer.text)
        assert answer.json()["choices"][0]["token_ids"] == expected_tokens([1, 2], 4)


async def test_a_damaged_body_is_refused(http: httpx.AsyncClient, worker: FakeWorker):
    for encoding, content in DAMAGED:
        answer = await compressed(http, encoding, content)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-encoding"), (encoding, content)
    assert worker.runs == []


@pytest.mark.parametrize("encoding", ["zstd", "br", "compress", "gzip, gzip", "x" * 5000])
async def test_other_encodings_are_named_and_what_is_taken_instead(http: httpx.AsyncClient, encoding: str):
    answer = await compressed(http, encoding, BODY)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate, identity")
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("content-encoding", "unsupported_content_encoding")
    assert "one of gzip, deflate, identity" in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_the_limit_is_of_what_a_body_holds(http: httpx.AsyncClient, encoding: str):
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    fits = compress(BODY + b" " * (MAX_BODY_BYTES - len(BODY)))
    assert (await compressed(http, encoding, fits)).status_code == 200
    bomb = await compressed(http, encoding, compress(bytes(MAX_BODY_BYTES + 1)))
    assert (bomb.status_code, bomb.json()["error"]["code"]) == (413, "request_too_large")


def test_a_bomb_is_inflated_no_further_than_somebody_takes_it():
    pieces = Inflater("gzip").pieces(gzip.compress(bytes(1 << 28)))
    assert [len(next(pieces)) for _ in range(3)] == [PIECE_BYTES] * 3


def test_a_body_in_parts_of_any_size_is_the_same_body():
    body = random.Random(0).randbytes(3 * PIECE_BYTES) + bytes(3 * PIECE_BYTES)
    for encoding, content in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
        for size in (1, 1000, len(content)):
            inflater = Inflater(encoding)
            parts = (content[begin : begin + size] for begin in range(0, len(content), size))
            assert b"".join(piece for part in parts for piece in inflater.pieces(part)) == body
            inflater.finish()


async def test_a_body_in_single_bytes_takes_little_more_memory_than_its_bytes():
    num_bytes, known = 4 * PIECE_BYTES, [0]
    body = Body(lambda so_far: known.__setitem__(0, so_far))
    tracemalloc.start()
    for _ in range(num_bytes):
        body.add(b"x")
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < num_bytes + 2 * PIECE_BYTES
    assert await body.whole() == b"x" * num_bytes
    assert known == [num_bytes]


def test_a_body_that_is_not_admitted_is_not_kept():
    def refuse(num_bytes: int) -> None:
        raise TooLarge(f"{num_bytes} bytes")

    body = Body(refuse)
    with pytest.raises(TooLarge, match="1000 bytes"):
        body.add(bytes(1000))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_http_1_0_client_gets_no_chunks_and_its_connection_ends(running: RunningGateway, is_stream: bool):
    async with connected(running) as raw:
        await raw.send(post("/v1/completions", ASKED | {"stream": is_stream}, version="1.0"))
        answer = await raw.answer()
        assert await raw.reader.read() == b""
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["connection"] == "close"
    text = answer.body.decode()
    tokens = tokens_of(events_of(text)) if is_stream else json.loads(text)["choices"][0]["token_ids"]
    assert tokens == expected_tokens([1, 2], 4)


async def test_an_http_1_0_connection_is_kept_where_that_is_asked_for_and_can_be(running: RunningGateway):
    async with connected(running) as raw:
        for _ in range(2):
            await raw.send(post("/v1/completions", ASKED, "Connection: Keep-Alive", version="1.0"))
            answer = await raw.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")
        await raw.send(post("/v1/completions", ASKED | {"stream": True}, "Connection: Keep-Alive", version="1.0"))
        assert (await raw.answer()).headers["connection"] == "close"


async def test_an_http_1_0_client_gets_no_interim_answer(running: RunningGateway):
    async with connected(running) as raw:
        await raw.send(post("/v1/completions", ASKED, "Expect: 100-continue", version="1.0"))
        assert (await raw.answer()).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/kimi"])
async def test_head_is_get_without_the_body(http: httpx.AsyncClient, path: str):
    got, head = await http.get(path), await http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert "content-length" in head.headers


async def test_a_path_with_a_slash_at_its_end_is_the_path(http: httpx.AsyncClient):
    for path in ("/health", "/v1/models", "/v1/models/kimi"):
        assert (await http.get(path + "/")).status_code == 200
    for path in ("/v1/completions/", "/v1/completions//"):
        answer = await http.post(path, json=ASKED)
        assert answer.json()["choices"][0]["token_ids"] == expected_tokens([1, 2], 4)
    assert 'route="/v1/completions",status="200"} 2.0' in (await http.get("/metrics/")).text
    assert (await http.get("/")).status_code == 404


@pytest.mark.parametrize(
    ("path", "allowed", "other"),
    [("/v1/completions", "POST, OPTIONS", "GET"), ("/v1/models", "GET, HEAD, OPTIONS", "DELETE")],
)
async def test_what_may_be_asked_is_said(http: httpx.AsyncClient, path: str, allowed: str, other: str):
    options, refused = await http.options(path), await http.request(other, path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, allowed, b"")
    assert (refused.status_code, set(refused.headers["allow"].split(", "))) == (405, set(allowed.split(", ")))
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert (await http.options("/nowhere")).status_code == 404


async def test_what_the_server_knows_at_all_is_said(running: RunningGateway):
    async with connected(running) as raw:
        await raw.send(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n")
        line = await raw.reader.readline()
        assert line == b"HTTP/1.1 204 No Content\r\n"


@pytest.mark.parametrize("has_body", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
async def test_an_offer_of_another_protocol_is_declined_and_the_request_served(
    running: RunningGateway, has_body: bool, is_cut: bool
):
    """Java's client offers HTTP/2 with each request."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk")
    request = post("/v1/completions", ASKED, *offer)
    if not has_body:
        lines = "".join(f"{line}\r\n" for line in ("Host: localhost", *offer))
        request = f"GET /health HTTP/1.1\r\n{lines}\r\n".encode()
    async with connected(running) as raw:
        for _ in range(3):
            for part in (request[:-5], request[-5:]) if is_cut else (request,):
                await raw.send(part)
                await asyncio.sleep(0)
            answer = await raw.answer()
            assert answer.status == 200
            if has_body:
                assert json.loads(answer.body)["choices"][0]["token_ids"] == expected_tokens([1, 2], 4)


async def test_the_body_of_a_request_that_made_an_offer_is_waited_for(running: RunningGateway):
    lines = ("Connection: Upgrade", "Upgrade: h2c", "Expect: 100-continue")
    head, _, body = post("/v1/completions", ASKED, *lines).partition(b"\r\n\r\n")
    async with connected(running) as raw:
        await raw.send(head + b"\r\n\r\n")
        assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await raw.send(body)
        assert (await raw.answer()).status == 200


async def test_requests_behind_one_that_made_an_offer_are_requests_of_their_own(running: RunningGateway):
    offer = ("Connection: Upgrade", "Upgrade: h2c")
    prompts = [[1, 2], [3], [4, 5]]
    offering, plain, offering_too = (
        post("/v1/completions", ASKED | {"prompt": prompt}, *lines)
        for prompt, lines in zip(prompts, (offer, (), offer), strict=True)
    )
    async with connected(running) as raw, asyncio.timeout(20):
        await raw.send(offering + plain + offering_too)
        for prompt in prompts:
            answer = await raw.answer()
            assert json.loads(answer.body)["choices"][0]["token_ids"] == expected_tokens(prompt, 4)


async def test_however_many_offers_come_at_once_the_connection_is_answered(running: RunningGateway):
    offering = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with connected(running) as raw, asyncio.timeout(20):
        await raw.send(offering * 3_000)
        assert (await raw.answer()).status == 200
    async with connected(running) as raw, asyncio.timeout(20):
        await raw.send(offering)
        assert (await raw.answer()).status == 200
