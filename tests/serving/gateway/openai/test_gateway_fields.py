"""Fields that clients send: served as they are meant, or named in the answer where nothing here knows them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import httpx
import pytest

from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.conftest import FIXTURE, with_file
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, FakeWorker, expected_tokens
from tests.serving.gateway.sse import events_of
from tests.serving.gateway.workers.fleet import front_of

TOKENIZER = load_tokenizer(FIXTURE)
HI = {"role": "user", "content": "hi"}
CHAT = {"messages": [HI], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f"}}
UNKNOWN = "x-moonshard-unknown-fields"
COUNTED = "moonshard_unknown_fields_total"
ODD = {
    "temprature": 1,
    "stream_options": {"usage": True},
    "messages": [HI | {"colour": 1}, {"role": "user", "content": [{"type": "text", "text": "a", "lang": "en"}]}],
}


def text_of(tokens: list[int]) -> str:
    assert TOKENIZER is not None
    return TOKENIZER.decode(tokens, skip_special=False)


def counted(metrics: str) -> float:
    return next(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(COUNTED))


async def test_what_is_unknown_is_served_named_and_counted(http: httpx.AsyncClient, worker: FakeWorker):
    response = await http.post("/v1/chat/completions", json=CHAT | ODD)
    assert response.status_code == 200, response.text
    assert set(response.headers[UNKNOWN].split(", ")) == {
        "temprature",
        "stream_options.usage",
        "messages[].colour",
        "messages[].content[].lang",
    }
    streamed = await http.post("/v1/chat/completions", json=CHAT | {"colour": 1, "stream": True})
    assert streamed.headers[UNKNOWN] == "colour"
    refused = await http.post("/v1/chat/completions", json=CHAT | {"colour": 1, "temperature": 9})
    assert (refused.status_code, refused.headers[UNKNOWN]) == (400, "colour")
    for path, body in (("/tokenize", {"prompt": "a", "x": 1}), ("/detokenize", {"tokens": [1.0], "x": 1})):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.headers[UNKNOWN]) == (200, "x")
    metrics = (await http.get("/metrics")).text
    assert counted(metrics) == 5
    assert "colour" not in metrics
    assert len(worker.runs) == 2


async def test_a_name_cannot_be_more_than_a_name_in_the_header(http: httpx.AsyncClient):
    hostile = {"a\r\nset-cookie: b=c": 1, "\u2603" * 1000: 1, "a, b": 1, "": 1} | {f"n{i}": 1 for i in range(50)}
    response = await http.post("/v1/chat/completions", json=CHAT | hostile)
    assert response.status_code == 200
    names = response.headers[UNKNOWN].split(", ")
    assert len(names) == 8
    assert all(len(name) <= 64 for name in names)
    assert names[0] == "a%0D%0Aset-cookie%3A%20b%3Dc"
    assert "set-cookie" not in response.headers


async def test_unknown_fields_are_refused_by_their_path_where_that_is_asked_for(
    worker: FakeWorker, gateway_config: GatewayConfig
):
    async with front_of(worker, replace(gateway_config, unknown_fields="refuse")) as (_, http):
        for body, path in (
            (CHAT | {"temprature": 1}, "temprature"),
            (CHAT | {"messages": [HI, HI | {"colour": 1}]}, "messages[1].colour"),
            (CHAT | {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ):
            error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", path)
        assert worker.runs == []
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_integers_may_be_written_as_floats(http: httpx.AsyncClient, worker: FakeWorker):
    floats = {"prompt": [1.0, 2, 3.0], "max_tokens": 5.0, "seed": 7.0, "top_k": -1.0, "min_tokens": 0.0, "n": 1.0}
    floats |= {"stop_token_ids": [9.0], "logprobs": 1.0, "return_token_ids": True}
    body = (await http.post("/v1/completions", json=floats)).json()
    assert body["choices"][0]["token_ids"] == expected_tokens([1, 2, 3], 5)
    run = worker.runs[0]
    assert (run.max_tokens, run.sampling.seed, run.logprobs, 9 in run.stop_token_ids) == (5, 7, 1, True)
    chat = CHAT | {"max_completion_tokens": 2.0, "logprobs": True, "top_logprobs": 1.0}
    assert (await http.post("/v1/chat/completions", json=chat)).json()["usage"]["completion_tokens"] == 2


async def test_cache_control_changes_no_prompt(http: httpx.AsyncClient):
    mark = {"cache_control": {"type": "ephemeral"}}
    plain = CHAT | {"tools": [TOOL], "return_token_ids": True}
    marked = plain | {
        "tools": [TOOL | mark],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"} | mark]} | mark],
    }
    answers = [await http.post("/v1/chat/completions", json=body) for body in (plain, marked)]
    assert answers[0].json()["prompt_token_ids"] == answers[1].json()["prompt_token_ids"]
    assert UNKNOWN not in answers[1].headers


async def test_an_answer_goes_on_with_a_partial_message(http: httpx.AsyncClient, worker: FakeWorker):
    begun = {"role": "assistant", "content": "It is", "partial": True}
    answer = await http.post("/v1/chat/completions", json=CHAT | {"messages": [HI, begun]})
    assert answer.status_code == 200, answer.text
    prompt = "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>It is"
    assert text_of(list(worker.runs[0].prompt_tokens)) == prompt
    empty = CHAT | {"messages": [HI, begun | {"content": ""}], "return_token_ids": True}
    usual = CHAT | {"return_token_ids": True}
    answers = [await http.post("/v1/chat/completions", json=body) for body in (empty, usual)]
    assert answers[0].json()["prompt_token_ids"] == answers[1].json()["prompt_token_ids"]


async def test_a_body_may_say_that_the_last_message_is_gone_on_with(http: httpx.AsyncClient, worker: FakeWorker):
    begun = {"role": "assistant", "content": "It is"}
    for more in ({}, {"add_generation_prompt": False}):
        asked = CHAT | {"messages": [HI, begun], "continue_final_message": True} | more
        assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
        prompt = "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>It is"
        assert text_of(list(worker.runs[-1].prompt_tokens)) == prompt
    tokenized = await http.post("/tokenize", json={"messages": [HI, begun], "continue_final_message": True})
    assert tokenized.json()["tokens"] == list(worker.runs[-1].prompt_tokens)


async def test_a_prompt_may_end_without_the_beginning_of_an_answer(http: httpx.AsyncClient, worker: FakeWorker):
    asked = CHAT | {"messages": [HI], "add_generation_prompt": False}
    assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
    assert text_of(list(worker.runs[0].prompt_tokens)) == "<|im_user|>user<|im_middle|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([HI], {}),
        ([HI, {"role": "assistant", "content": "It is"}], {"add_generation_prompt": True}),
        ([HI, {"role": "assistant", "tool_calls": [{"id": "f:0", "function": {"name": "f", "arguments": "{}"}}]}], {}),
    ],
    ids=["user", "both", "call"],
)
async def test_what_cannot_be_gone_on_with_is_refused_by_the_field_that_asks(
    http: httpx.AsyncClient, worker: FakeWorker, messages, more
):
    asked = CHAT | {"messages": messages, "continue_final_message": True} | more
    response = await http.post("/v1/chat/completions", json=asked)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")
    assert worker.runs == []


async def test_completions_without_max_tokens_take_what_is_left(http: httpx.AsyncClient, worker: FakeWorker):
    answers = [
        await http.post("/v1/completions", json={"prompt": [1] * num_prompt})
        for num_prompt in (3, MAX_CONTEXT_TOKENS - 5, MAX_CONTEXT_TOKENS)
    ]
    assert [run.max_tokens for run in worker.runs] == [16, 5]
    assert answers[2].json()["error"]["code"] == "context_length_exceeded"


async def test_every_chunk_has_the_usage_so_far_where_that_is_asked_for(http: httpx.AsyncClient):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": [1, 2, 3], "max_tokens": 4, "n": 2, "stream": True, "return_token_ids": True}
    asked |= {"stream_options": options}
    *events, last = events_of((await http.post("/v1/completions", json=asked)).text)
    counts = accumulate(len(event["choices"][0]["token_ids"]) for event in events)
    assert [event["usage"]["completion_tokens"] for event in events] == list(counts)
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}
    assert last["usage"]["total_tokens"] == 11
    without = asked | {"stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in e for e in events_of((await http.post("/v1/completions", json=without)).text))


async def test_obfuscated_chunks_have_a_length_that_tells_little(http: httpx.AsyncClient):
    asked = CHAT | {"max_tokens": 8, "stream": True, "stream_options": {"include_obfuscation": True}}
    padded = (await http.post("/v1/chat/completions", json=asked)).text
    plain = (await http.post("/v1/chat/completions", json=asked | {"stream_options": None})).text
    lengths = [{len(block.encode()) % 64 for block in text.split("\n\n")[:-2]} for text in (padded, plain)]
    assert len(lengths[0]) == 1
    assert len(lengths[1]) > 1
    said = [[event["choices"][0]["delta"] for event in events_of(text)] for text in (padded, plain)]
    assert said[0] == said[1]


async def test_no_chunk_is_empty(http: httpx.AsyncClient, worker: FakeWorker):
    assert TOKENIZER is not None
    spoken = TOKENIZER.encode("a \U0001f327 b")  # characters that several tokens make
    worker.script.next_token = lambda _choice, _last, position: spoken[
        (position - len(worker.runs[-1].prompt_tokens)) % len(spoken)
    ]
    asked = CHAT | {"max_tokens": len(spoken), "stream": True, "reasoning_effort": "none"}
    first, *others, last = events_of((await http.post("/v1/chat/completions", json=asked)).text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = [event["choices"][0]["delta"]["content"] for event in others]
    said.append(last["choices"][0]["delta"].get("content", ""))
    assert all(said[:-1])
    assert "".join(said) == "a \U0001f327 b"
    assert len(others) + 1 < len(spoken)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_text_offsets_count_the_characters_that_the_client_gets(
    http: httpx.AsyncClient, worker: FakeWorker, is_stream: bool
):
    assert TOKENIZER is not None
    spoken = [*TOKENIZER.encode("a\U0001f327"), TOKENIZER.special_tokens["<|im_middle|>"], *TOKENIZER.encode("b c")]
    worker.script.next_token = lambda _choice, _last, position: spoken[(position - 1) % len(spoken)]
    asked = {"prompt": [1], "max_tokens": len(spoken), "logprobs": 0, "stream": is_stream}
    response = await http.post("/v1/completions", json=asked)
    events = events_of(response.text) if is_stream else [response.json()]
    choices = [event["choices"][0] for event in events]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    text = "".join(choice["text"] for choice in choices)
    assert text == "a\U0001f327b c"
    assert offsets == [len(TOKENIZER.decode(spoken[:i]).replace("\ufffd", "")) for i in range(len(spoken))]


@pytest.fixture
def model_path(request: pytest.FixtureRequest, kimi_folder: Path, tmp_path: Path) -> Path:
    """For the test that asks for it: a template that writes reasoning."""
    if "reasoning_template" not in request.fixturenames:
        return kimi_folder
    source = "{% for m in messages %}[{{ m.get('reasoning_content') }}|{{ m['content'] }}]{% endfor %}"
    return with_file(kimi_folder, tmp_path, "chat_template.jinja", source)


@pytest.fixture
def reasoning_template() -> None:
    pass


@pytest.fixture
async def template_http(reasoning_template: None, running: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_that_is_sent_back_is_for_the_template(
    template_http: httpx.AsyncClient, worker: FakeWorker, name: str
):
    turn = {"role": "assistant", "content": "b", name: "because"}
    answer = await template_http.post("/v1/chat/completions", json=CHAT | {"messages": [HI, turn]})
    assert answer.status_code == 200, answer.text
    assert text_of(list(worker.runs[0].prompt_tokens)) == "[None|hi][because|b]"
