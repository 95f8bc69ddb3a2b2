"""What a client sees over HTTP when all is well."""

import asyncio
import json
from dataclasses import fields

import httpx
import pytest

from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.types import Timing
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.conftest import FIXTURE
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, FakeWorker, expected_tokens
from tests.serving.gateway.sse import decoded, events_of, tokens_of

TOKENIZER = load_tokenizer(FIXTURE)
PROMPT = [1, 2, 3]
BASE = {"model": "kimi", "prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}
CHAT = {"model": "kimi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "return_token_ids": True}


def text_of(tokens: list[int]) -> str:
    assert TOKENIZER is not None
    return TOKENIZER.decode(tokens)


def script_text(worker: FakeWorker, text: str) -> list[int]:
    """Make the worker say `text`, over and over."""
    assert TOKENIZER is not None
    tokens = TOKENIZER.encode(text)
    worker.script.next_token = lambda _choice, _last, position: tokens[(position - len(PROMPT)) % len(tokens)]
    return tokens


async def test_a_completion_holds_the_workers_tokens_and_counts_them(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.cached_tokens = 2
    body = (await http.post("/v1/completions", json=BASE)).json()
    expected = expected_tokens(PROMPT, 8)
    assert body["choices"][0]["token_ids"] == expected
    assert body["choices"][0]["text"] == text_of(expected)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["prompt_token_ids"] == PROMPT
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["system_fingerprint"] == "fp_ffffffffffff"


async def test_what_was_not_in_a_devices_pages_is_told_by_tier(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.cached_tokens, worker.script.cached_by_tier = 2, {"ssd": 1, "host": 1}
    one = (await http.post("/v1/completions", json=BASE)).json()["usage"]["prompt_tokens_details"]
    assert one == {"cached_tokens": 2, "cached_tokens_details": {"device": 0, "host": 1, "ssd": 1}}
    several = BASE | {"prompt": [PROMPT, PROMPT, [1]]}  # of the last nothing can have been found
    all_of_them = (await http.post("/v1/completions", json=several)).json()["usage"]["prompt_tokens_details"]
    assert all_of_them == {"cached_tokens": 4, "cached_tokens_details": {"device": 0, "host": 2, "ssd": 2}}


async def test_a_stream_says_what_the_whole_says(http: httpx.AsyncClient):
    whole = (await http.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]
    events = events_of((await http.post("/v1/chat/completions", json=CHAT | {"stream": True})).text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert tokens_of(events) == whole["token_ids"]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == whole["message"]["content"]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * 8 + ["length"]
    assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [events[0]["prompt_token_ids"]]


async def test_usage_is_the_last_event_and_null_in_the_others(http: httpx.AsyncClient):
    asked = BASE | {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of((await http.post("/v1/completions", json=asked)).text)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert [event["usage"] for event in events] == [None] * 8


async def test_without_asking_no_event_has_usage(http: httpx.AsyncClient):
    events = events_of((await http.post("/v1/completions", json=BASE | {"stream": True})).text)
    assert len(events) == 8
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize("is_usage_asked", [False, True])
async def test_timing_comes_with_the_last_event_and_its_phases_are_the_whole(
    http: httpx.AsyncClient, is_usage_asked: bool
):
    asked = BASE | {"stream": True, "return_timing": True}
    if is_usage_asked:
        asked["stream_options"] = {"include_usage": True}
    *events, last = events_of((await http.post("/v1/completions", json=asked)).text)
    assert not any("timing" in event for event in events)
    assert (last["choices"], "usage" in last) == ([], is_usage_asked)
    timing = Timing(**last["timing"])
    assert sum(timing.phases().values()) == pytest.approx(timing.e2e_ms)
    assert timing.worker_prefill_ms > 0


async def test_a_whole_answer_has_the_timing_a_stream_has_and_only_where_it_was_asked_for(http: httpx.AsyncClient):
    whole = (await http.post("/v1/chat/completions", json=CHAT | {"return_timing": True})).json()
    assert whole["timing"].keys() == {field.name for field in fields(Timing)}
    assert 0 < whole["timing"]["ttft_ms"] <= whole["timing"]["e2e_ms"]
    assert "timing" not in (await http.post("/v1/chat/completions", json=CHAT)).json()


async def test_http_and_grpc_give_the_same_tokens_and_text(http: httpx.AsyncClient, grpc_client: AsyncClient):
    events = events_of((await http.post("/v1/completions", json=BASE | {"stream": True, "n": 2})).text)
    completion = await grpc_client.generate(PROMPT, max_tokens=8, n=2)
    for choice in completion.choices:
        index = completion.choices.index(choice)
        assert tokens_of(events, index) == list(choice.token_ids) == expected_tokens(PROMPT, 8, index)
        texts = [p["text"] for e in events for p in e["choices"] if p["index"] == index]
        assert "".join(texts) == choice.text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_ends_the_text_the_bill_and_the_work(
    http: httpx.AsyncClient, worker: FakeWorker, is_stream: bool
):
    tokens = script_text(worker, "one two three four five six")
    num_billed = next(n for n in range(len(tokens) + 1) if "three" in text_of(tokens[:n]))
    asked = BASE | {"max_tokens": 1_000, "stop": ["three"], "stream": is_stream}
    if is_stream:
        asked["stream_options"] = {"include_usage": True}
    response = await http.post("/v1/completions", json=asked)
    if is_stream:
        *events, last = events_of(response.text)
        choices, usage = [event["choices"][0] for event in events], last["usage"]
    else:
        choices, usage = response.json()["choices"], response.json()["usage"]
    assert "".join(choice["text"] for choice in choices) == "one two "
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "three"
    assert usage["completion_tokens"] == num_billed
    await asyncio.wait_for(worker.cancel_seen.wait(), 5)
    assert worker.cancelled == [worker.runs[0].request_id]


async def test_a_stop_string_ends_one_choice_and_not_its_sibling(http: httpx.AsyncClient, worker: FakeWorker):
    assert TOKENIZER is not None
    says = [TOKENIZER.encode("a b c"), TOKENIZER.encode("x y z")]
    worker.script.next_token = lambda choice, _last, position: says[choice][
        (position - len(PROMPT)) % len(says[choice])
    ]
    body = (await http.post("/v1/completions", json=BASE | {"n": 2, "stop": "b", "max_tokens": 20})).json()
    stopped, full = body["choices"]
    assert (stopped["finish_reason"], full["finish_reason"]) == ("stop", "length")
    assert len(full["token_ids"]) == 20
    assert body["usage"]["completion_tokens"] == 20 + len(stopped["token_ids"])
    assert worker.cancelled == []


async def test_a_stop_token_ends_the_choice_without_text(http: httpx.AsyncClient):
    expected = expected_tokens(PROMPT, 8)
    body = (await http.post("/v1/completions", json=BASE | {"stop_token_ids": [expected[4]]})).json()
    choice = body["choices"][0]
    assert choice["token_ids"] == expected[:5]
    assert choice["text"] == text_of(expected[:4])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", expected[4])


async def test_what_the_client_leaves_out_is_the_folders_then_neutral(http: httpx.AsyncClient, worker: FakeWorker):
    await http.post("/v1/completions", json=BASE)
    await http.post("/v1/completions", json=BASE | {"temperature": 0, "top_k": -1, "ignore_eos": True, "seed": -1})
    default, said = worker.runs
    assert (round(default.sampling.temperature, 3), round(default.sampling.top_p, 3)) == (0.6, 0.95)
    assert default.sampling.repetition_penalty == 1
    assert list(default.stop_token_ids) == [2017, 2018]
    assert said.sampling.temperature == 0
    assert said.sampling.top_k == 0
    assert said.sampling.seed == 2**64 - 1
    assert list(said.stop_token_ids) == []
    assert len({run.request_id for run in worker.runs}) == 2


async def test_unset_max_tokens_is_the_rest_of_the_context_in_a_chat(http: httpx.AsyncClient, worker: FakeWorker):
    body = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
    assert usage["total_tokens"] == MAX_CONTEXT_TOKENS
    assert worker.runs[0].max_tokens == MAX_CONTEXT_TOKENS - usage["prompt_tokens"]


async def test_completion_logprobs_have_offsets_into_the_text_on_a_stream_too(
    http: httpx.AsyncClient, worker: FakeWorker
):
    script_text(worker, "one two three")
    asked = BASE | {"logprobs": 2}
    whole = (await http.post("/v1/completions", json=asked)).json()["choices"][0]
    for token, offset in zip(whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"], strict=True):
        assert whole["text"][offset:].startswith(token)
    events = events_of((await http.post("/v1/completions", json=asked | {"stream": True})).text)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for e in events for x in e["choices"][0]["logprobs"][name]] == whole["logprobs"][name]


async def test_the_clients_request_id_is_echoed_and_a_hostile_one_is_not(http: httpx.AsyncClient):
    given = await http.post("/v1/completions", json=BASE, headers={"x-request-id": "mine-1"})
    assert (given.headers["x-request-id"], given.json()["id"]) == ("mine-1", "cmpl-mine-1")
    drawn = await http.post("/v1/completions", json=BASE, headers={"x-request-id": "a b"})
    assert drawn.headers["x-request-id"] != "a b"
    assert drawn.json()["id"] == "cmpl-" + drawn.headers["x-request-id"]
    in_body = await http.post("/v1/completions", json=BASE | {"request_id": "body-1"})
    assert in_body.json()["id"] == "body-1"


async def test_the_same_client_id_twice_at_once_mixes_nothing_up(http: httpx.AsyncClient, worker: FakeWorker):
    prompts = [[i, i + 1] for i in range(20)]
    asked = [BASE | {"prompt": prompt, "request_id": "same"} for prompt in prompts]
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in asked))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.json()["choices"][0]["token_ids"] == expected_tokens(prompt, 8)
    assert len({run.request_id for run in worker.runs}) == 20


async def test_a_hundred_streams_at_once_are_each_their_own(running: RunningGateway, worker: FakeWorker):
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=running.http, timeout=60, trust_env=False, limits=limits) as client:
        asked = [BASE | {"prompt": [i], "stream": True, "max_tokens": 20} for i in range(100)]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in asked))
    for i, answer in enumerate(answers):
        assert tokens_of(events_of(answer.text)) == expected_tokens([i], 20)
    assert running.gateway.num_running == 0


async def test_tokenize_and_detokenize_are_inverse(http: httpx.AsyncClient):
    tokenized = (await http.post("/tokenize", json={"model": "kimi", "prompt": "Hello, world"})).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == MAX_CONTEXT_TOKENS
    detokenized = (await http.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()
    assert detokenized == {"prompt": "Hello, world"}


async def test_tokenize_gives_what_a_chat_will_prefill(http: httpx.AsyncClient):
    tokenized = (await http.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    assert (await http.post("/v1/chat/completions", json=CHAT)).json()["prompt_token_ids"] == tokenized["tokens"]


async def test_tokenize_leaves_the_generation_prompt_out_where_asked(http: httpx.AsyncClient):
    whole = (await http.post("/tokenize", json={"messages": CHAT["messages"]})).json()["tokens"]
    bare = await http.post("/tokenize", json={"messages": CHAT["messages"], "add_generation_prompt": False})
    assert len(bare.json()["tokens"]) < len(whole)
    assert whole[: len(bare.json()["tokens"])] == bare.json()["tokens"]


async def test_text_parts_are_joined(http: httpx.AsyncClient):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    asked = CHAT | {"messages": [{"role": "user", "content": parts}]}
    joined = (await http.post("/v1/chat/completions", json=asked)).json()
    assert joined["prompt_token_ids"] == (await http.post("/v1/chat/completions", json=CHAT)).json()["prompt_token_ids"]


async def test_operators_routes_answer(http: httpx.AsyncClient):
    health = await http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert list(health.json()["workers"].values()) == ["ready"]
    assert (await http.get("/ready")).status_code == 200
    assert (await http.get("/version")).json()["version"]
    models = (await http.get("/v1/models")).json()
    assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("kimi", MAX_CONTEXT_TOKENS)]
    assert (await http.get("/v1/models/kimi")).json() == models["data"][0]


@pytest.mark.parametrize("keep_alive_s", [0.02])
async def test_a_queued_stream_is_kept_alive_until_its_first_token(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.may_step.clear()
    async with http.stream("POST", "/v1/completions", json=BASE | {"stream": True}) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(3)] == [": keep-alive", "", ": keep-alive"]
        worker.script.may_step.set()
        rest = [line async for line in lines]
    assert ": keep-alive" not in rest[rest.index(next(line for line in rest if line.startswith("data"))) :]
    assert tokens_of(decoded([line for line in rest if line.startswith("data: {")])) == expected_tokens(PROMPT, 8)


async def test_the_long_texts_tokenised_in_a_thread_are_the_same_tokens(http: httpx.AsyncClient, worker: FakeWorker):
    assert TOKENIZER is not None
    text = "a" * 3_500
    response = await http.post("/tokenize", json={"prompt": text})
    assert response.json()["tokens"] == TOKENIZER.encode(text)


async def test_a_reader_that_stops_reading_delays_nobody_else(running: RunningGateway, worker: FakeWorker):
    host, port = running.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(BASE | {"stream": True, "max_tokens": 1_900, "n": 8, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"data: ")  # and no further: about 30 MB wait behind it
    async with httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as client:
        answer = await client.post("/v1/completions", json=BASE)
    assert answer.json()["choices"][0]["token_ids"] == expected_tokens(PROMPT, 8)
    assert running.gateway.num_running == 1
    writer.close()
    await asyncio.wait_for(running.gateway.wait_idle(), 5)


@pytest.mark.parametrize("batch", [[[65, 66, 67]], ["ABC"]])
async def test_a_batch_of_one_prompt_is_that_prompt(http: httpx.AsyncClient, worker: FakeWorker, batch: list):
    alone = await http.post("/v1/completions", json=BASE | {"prompt": batch[0]})
    batched = await http.post("/v1/completions", json=BASE | {"prompt": batch})
    assert batched.json()["choices"] == alone.json()["choices"]
    assert worker.runs[0].prompt_tokens == worker.runs[1].prompt_tokens


async def test_a_bound_is_named_to_its_last_digit(http: httpx.AsyncClient):
    refused = await http.post("/v1/completions", json=BASE | {"max_tokens": 0})
    assert refused.json()["error"]["message"] == "max_tokens: must be at least 1 and at most 4294967295, not 0"
