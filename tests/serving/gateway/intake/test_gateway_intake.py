"""Input that no context could hold is refused before it is parsed, and the bytes in flight at once are bounded."""

import asyncio

import grpc
import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from moonshard.models.tokenizers.tokenizer import TextTooLongError, load_tokenizer
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import ContextLengthExceeded, InvalidArgument, Overloaded, RequestError, TooLarge
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.http import edge
from moonshard.serving.gateway.intake import bounds as intake
from moonshard.serving.gateway.intake.bounds import MAX_LEVELS, MAX_OBJECTS, MAX_OTHER_VALUES, Bounds, Intake
from moonshard.serving.gateway.intake.json_marks import OBJECT_BYTES, VALUE_BYTES, Contents, contents_of
from moonshard.serving.gateway.intake.large_bodies import LARGE_BYTES
from moonshard.serving.gateway.pipeline import model
from moonshard.serving.gateway.pipeline.model import LONG_TEXT_CHARS, MAX_ENCODING, PromptLimit
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.conftest import FIXTURE
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, FakeWorker

TOKENIZER = load_tokenizer(FIXTURE)
MAX_BYTES, IN_FLIGHT = 8 << 20, 10 << 20


@pytest.fixture
def gateway_config() -> GatewayConfig:
    return GatewayConfig(
        port=0, grpc_port=0, max_body_bytes=MAX_BYTES, max_bytes_in_flight=IN_FLIGHT, drain_timeout_s=5
    )


BOUNDS = Bounds(max_body_bytes=MAX_BYTES, max_context_tokens=100, max_token_bytes=10)


def check(bounds: Bounds, body: bytes, num_contexts: int = 1) -> None:
    bounds.check_contents(contents_of(body), num_contexts)


def test_many_values_are_refused_and_as_many_commas_in_a_text_are_not():
    many = MAX_OTHER_VALUES + 200
    with pytest.raises(InvalidArgument, match="values"):
        check(BOUNDS, b'{"metadata":{' + b",".join(b'"%d":[]' % number for number in range(many)) + b"}}")
    check(BOUNDS, b'{"prompt":"' + b"[,{" * many + b'"}')
    ids = b'{"prompt":[' + b"1000," * (MAX_CONTEXT_TOKENS - 1) + b"1]}"
    check(Bounds(max_body_bytes=MAX_BYTES, max_context_tokens=MAX_CONTEXT_TOKENS, max_token_bytes=10), ids)


def test_many_objects_are_refused_where_as_many_ids_are_not():
    bounds = Bounds(max_body_bytes=MAX_BYTES, max_context_tokens=100_000, max_token_bytes=10)
    with pytest.raises(InvalidArgument, match="objects"):
        check(bounds, b'{"messages":[' + b'{"a":1},' * MAX_OBJECTS + b"{}]}")
    check(bounds, b'{"messages":[' + b'{"a":1},' * (MAX_OBJECTS - 2) + b'{"content":"' + b"{" * 99 + b'"}]}')
    check(bounds, b'{"prompt":[' + b"1," * (MAX_OBJECTS * 2) + b"1]}")


@pytest.mark.parametrize("number", [-1, 2**32, 2**70])
async def test_an_id_that_is_no_id_is_named_among_many(number: int, http: httpx.AsyncClient):
    refused = await http.post("/v1/completions", json={"prompt": [*[1] * 1_100, number], "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("padding", [0, LARGE_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("num_levels", [MAX_LEVELS - 10, MAX_LEVELS + 1, 1_200, 1_472, 3_000])
async def test_what_is_nested_too_deeply_is_refused_whatever_its_size(
    num_levels: int, padding: int, http: httpx.AsyncClient
):
    nested = b'"chat_template_kwargs":{"a":' + b"[" * num_levels + b"]" * num_levels + b"}"
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,' + nested + b" " * padding + b"}"
    answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == (200 if num_levels < MAX_LEVELS else 400), answer.text


async def test_a_name_of_many_characters_is_refused_by_its_field(http: httpx.AsyncClient):
    refused = await http.post("/v1/completions", json={"prompt": [1], "user": "x" * 20_000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "user")
    refused = await http.post("/v1/completions", json={"prompt": [1], "model": "\0" * 100_000})
    assert refused.status_code == 404
    assert len(refused.json()["error"]["message"]) < 1_000


async def test_a_text_that_is_too_long_for_one_answer_is_not_sent(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model, "MAX_TEXT_CHARS", 10)
    assert (await http.post("/detokenize", json={"tokens": [1] * 5})).status_code == 200
    refused = await http.post("/detokenize", json={"tokens": [1] * 50})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


async def test_far_more_ids_than_fit_are_a_prompt_too_long_and_as_many_members_are_not(http: httpx.AsyncClient):
    many = MAX_OTHER_VALUES + 2 * MAX_CONTEXT_TOKENS
    refused = await http.post("/v1/completions", json={"prompt": [1000] * many, "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused = await http.post("/v1/completions", json={"prompt": [[1000] * 100] * (many // 100), "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    biased = {"prompt": [1], "logit_bias": {str(100_000 + number): 1 for number in range(many)}}
    refused = await http.post("/v1/completions", json=biased)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")


def test_ids_of_as_many_contexts_as_may_be_spelt_out_are_not_too_many_values():
    bounds = Bounds(max_body_bytes=MAX_BYTES, max_context_tokens=50_000, max_token_bytes=10)
    ids = b'{"tokens":[' + b"1," * 99_999 + b"1]}"
    with pytest.raises(InvalidArgument, match="values"):
        check(bounds, ids)
    check(bounds, ids, num_contexts=2)


def test_a_body_is_bounded_by_what_its_context_could_hold_and_by_what_is_configured():
    longest = 6 * 10 * 100 + intake.OTHER_BYTES
    BOUNDS.check_bytes(longest)
    with pytest.raises(ContextLengthExceeded):
        BOUNDS.check_bytes(longest + 1)
    BOUNDS.check_bytes(longest + 1, num_contexts=2)
    for bounds in (BOUNDS, Bounds(max_body_bytes=MAX_BYTES, max_context_tokens=None, max_token_bytes=None)):
        with pytest.raises(TooLarge):
            bounds.check_bytes(MAX_BYTES + 1)


def test_a_message_is_bounded_without_escapes_and_by_what_ids_take():
    BOUNDS.check_bytes(10 * 100 + intake.OTHER_BYTES, bytes_per_text_byte=1)
    with pytest.raises(ContextLengthExceeded):
        BOUNDS.check_bytes(10 * 100 + intake.OTHER_BYTES + 1, bytes_per_text_byte=1)
    of_bytes = Bounds(max_body_bytes=MAX_BYTES, max_context_tokens=100, max_token_bytes=1)
    of_bytes.check_bytes(intake.MAX_ID_BYTES * 100 + intake.OTHER_BYTES, bytes_per_text_byte=1)


def test_what_a_body_becomes_has_room_where_nothing_else_is_here():
    gate = Intake(1000, lambda: BOUNDS)
    one, _ = gate.admission()
    one.grow_to_hold(100, Contents(num_objects=1_000))
    assert gate.in_flight.num == 1000
    other, _ = gate.admission()
    with pytest.raises(Overloaded):
        other.grow_to_hold(1, Contents())
    one.give_back()
    other.grow_to_hold(100, Contents(num_objects=1, num_values=2))
    assert gate.in_flight.num == 100 + OBJECT_BYTES + 2 * VALUE_BYTES
    other.give_back()
    assert gate.in_flight.num == 0


async def test_an_answer_counts_while_it_is_taken_in_pieces():
    gate = Intake(200_000, lambda: BOUNDS)
    share, _ = gate.admission()
    scope = {"type": "http", "headers": [], edge.SHARE: share}
    body = bytes(range(256)) * 500
    answer, sent = edge.large_answer(Request(scope), body), []

    async def take(message: Message) -> None:
        assert gate.in_flight.num == len(body)
        sent.append(message)

    await answer(scope, no_more, take)
    start, *pieces = sent
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    assert b"".join(piece["body"] for piece in pieces) == body
    assert max(len(piece["body"]) for piece in pieces) <= edge.ANSWER_PIECE_BYTES < len(body)
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    edge.large_answer(Request(scope), body)  # of work that is done nobody is told to come again
    assert gate.in_flight.num == 2 * len(body) > gate.in_flight.limit
    other, admit_other = gate.admission()
    with pytest.raises(Overloaded):
        admit_other(1)
    share.give_back()
    other.give_back()
    assert gate.in_flight.num == 0


async def no_more() -> Message:
    raise AssertionError


def test_what_was_taken_is_given_back_once_and_what_was_refused_was_not_taken():
    gate = Intake(1000, lambda: BOUNDS)
    one, admit_one = gate.admission()
    other, admit_other = gate.admission()
    admit_one(400)
    admit_one(300)  # less than is known already
    admit_other(600)
    with pytest.raises(Overloaded):
        admit_one(401)
    assert gate.in_flight.num == 1000
    for share in (one, one, other, other):
        share.give_back()
    assert gate.in_flight.num == 0


@pytest.mark.parametrize(
    "text", ["a" * 400_000, "word " * 80_000, "漢字" * 100_000, " " * 300_000], ids=lambda t: t[:5]
)
def test_a_long_text_is_refused_after_a_part_of_it_and_a_short_one_never(text: str):
    assert TOKENIZER is not None
    whole = TOKENIZER.encode(text)
    with pytest.raises(TextTooLongError) as caught:
        TOKENIZER.encode(text, max_tokens=100)
    assert 100 < caught.value.num_tokens <= len(whole)
    assert TOKENIZER.encode(text, max_tokens=len(whole)) == whole


TOO_LONG = {
    "text": {"prompt": "word " * 20_000},
    "ids": {"prompt": [1] * (MAX_CONTEXT_TOKENS + 1)},
    "a body beyond all text": {"prompt": "a" * (4 << 20)},
}


@pytest.mark.parametrize("asked", TOO_LONG.values(), ids=TOO_LONG.keys())
async def test_what_no_context_holds_is_refused_by_openais_code(asked, http: httpx.AsyncClient, worker: FakeWorker):
    response = await http.post("/v1/completions", json=asked)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert worker.runs == []


async def test_over_grpc_too(grpc_client: AsyncClient, worker: FakeWorker):
    for prompt in ("word " * 20_000, [1] * (MAX_CONTEXT_TOKENS + 1), "a" * (4 << 20)):
        with pytest.raises(RequestError) as caught:
            await grpc_client.generate(prompt, max_tokens=1)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert worker.runs == []


async def test_texts_of_several_contexts_are_counted_and_longer_ones_are_not(http: httpx.AsyncClient):
    counted = await http.post("/tokenize", json={"prompt": "word " * (MAX_CONTEXT_TOKENS - 1)})
    assert counted.json()["count"] > MAX_CONTEXT_TOKENS
    refused = await http.post("/tokenize", json={"prompt": "word " * (5 * MAX_CONTEXT_TOKENS)})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_CONTEXT_TOKENS} tokens" in refused.json()["error"]["message"]
    spelt = await http.post("/detokenize", json={"tokens": [1] * (5 * MAX_CONTEXT_TOKENS)})
    assert (spelt.status_code, spelt.json()["error"]["param"]) == (400, "tokens")


async def test_bodies_beyond_what_may_be_here_at_once_are_told_to_come_again(
    http: httpx.AsyncClient, running: RunningGateway
):
    """Each of these sends nearly all of its body and then nothing on."""
    host, port = running.http.removeprefix("http://").split(":")
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1_600_000}\r\n\r\n".encode()
    waiting = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
    for _, writer in waiting:
        writer.write(head + b" " * 1_590_000)
        await writer.drain()
    body = {"prompt": "a" * (1 << 20)}
    async with asyncio.timeout(20):
        while (refused := await http.post("/tokenize", json=body)).status_code != 429:
            assert refused.status_code == 400  # until all have been read
    assert float(refused.headers["retry-after"]) > 0
    for _, writer in waiting:
        writer.close()
        await writer.wait_closed()
    async with asyncio.timeout(20):
        while (await http.post("/tokenize", json=body)).status_code == 429:
            pass


async def test_a_client_that_has_left_is_not_tokenised(running: RunningGateway, monkeypatch: pytest.MonkeyPatch):
    """All threads are busy when it comes; it leaves before one is free."""
    from threading import Event

    from moonshard.serving.gateway.request import GenerationRequest, TextPrompt

    model, free, begun = running.gateway.model, Event(), []
    busy = [asyncio.ensure_future(model.threads.run(LONG_TEXT_CHARS + 1, free.wait)) for _ in range(MAX_ENCODING)]
    assert model.tokenizer is not None
    monkeypatch.setattr(type(model.tokenizer), "encode", lambda *args, **kwargs: begun.append(args) or [1])
    asked = GenerationRequest(request_id="", received_ns=0, prompt=TextPrompt("a" * 5000))
    left = asyncio.create_task(model.tokenize(asked, PromptLimit.to_generate(1000)))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    stays = asyncio.create_task(model.tokenize(asked, PromptLimit.to_generate(1000)))
    free.set()
    assert await stays == [1]
    assert len(begun) == 1
    assert all(await asyncio.gather(*busy))
