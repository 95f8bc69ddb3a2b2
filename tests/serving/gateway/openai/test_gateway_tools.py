"""Tools through the gateway, asked for with OpenAI's own client: calls come out whole, and so does what is no call."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.serving.chat.tool_calls import NAMES
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.conftest import FIXTURE, with_file
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.sse import events_of

TOKENIZER = load_tokenizer(FIXTURE)
assert TOKENIZER is not None
END = TOKENIZER.special_tokens["<|im_end|>"]
SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = NAMES.values()
TOOLS: list = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "add-up"}},
]
ASKED: Any = {
    "model": "kimi",
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": TOOLS,
    "max_tokens": 300,
    "reasoning_effort": "none",  # the fixture's prompt would begin a thought
}
ARGUMENTS = '{"city": "Oslo \U0001f327 \\u00f8", "when": {"day": "}"}}'


def call(call_id: str = "functions.get_weather:0", arguments: str = ARGUMENTS) -> str:
    return f"{CALL_BEGIN}{call_id}{ARGUMENTS_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION_BEGIN + "".join(calls) + SECTION_END


CALL = section(call())
ANSWERS = {
    "a call": CALL,
    "text before": "Let me look. " + CALL,
    "two calls": section(call(), call("functions.add-up:1", "{}")),
    "two sections": CALL + "and" + section(call("functions.add-up:1", "{}")),
    "no call": "It rains.",
    "unknown function": "Well: " + section(call("functions.get_time:0")),
    "no object": section(call(arguments="[1]")),
    "never ends": SECTION_BEGIN + call(),
    "call never ends": SECTION_BEGIN + call().removesuffix(CALL_END),
    "begins no call": SECTION_BEGIN + "so",
    "out of order": CALL_BEGIN + CALL,
    "spelt in text": "The marker <|tool_calls_section_begin|> is special.",
}
VALID = {"a call": 1, "text before": 1, "two calls": 2, "two sections": 2, "out of order": 1}
VALID |= {"never ends": 1, "call never ends": 1}


def tokens_of(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text, allow_special=True)


def say(worker: FakeWorker, *answers: Sequence[int]) -> None:
    """Each choice says its own answer, and then the end token for ever."""

    def next_token(choice: int, _last: int, position: int) -> int:
        said = answers[choice]
        place = position - len(worker.runs[-1].prompt_tokens)
        return said[place] if place < len(said) else END

    worker.script.next_token = next_token


@pytest.fixture
async def client(running: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{running.http}/v1", api_key="-", max_retries=0, http_client=transport
    ) as client:
        yield client


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> tuple[list[ChatCompletionChunk], ChatCompletion]:
    """The chunks, and what OpenAI's client adds them up to."""
    state = ChatCompletionStreamState()
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    for chunk in chunks:
        state.handle_chunk(chunk)
    return chunks, state.current_completion_snapshot


def told(answer: ChatCompletion) -> list[tuple]:
    return [
        (
            choice.finish_reason,
            choice.message.content or None,  # a stream opens with the empty text
            [(made.id, made.type, made.function.name, made.function.arguments) for made in calls_of(choice.message)],
        )
        for choice in answer.choices
    ]


def calls_of(message: Any) -> list[Any]:
    return message.tool_calls or []


async def test_a_call_comes_out_with_the_models_own_id_and_arguments(client: openai.AsyncOpenAI, worker: FakeWorker):
    say(worker, tokens_of(ANSWERS["two calls"]))
    answer = await client.chat.completions.create(**ASKED)
    first, second = calls_of(answer.choices[0].message)
    assert (first.id, first.function.name, first.function.arguments) == (
        "functions.get_weather:0",
        "get_weather",
        ARGUMENTS,
    )
    assert (second.id, second.function.name, second.function.arguments) == ("functions.add-up:1", "add-up", "{}")
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(tokens_of(ANSWERS["two calls"])) + 1


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_adds_up_to_the_whole(client: openai.AsyncOpenAI, worker: FakeWorker, name: str):
    said = tokens_of(ANSWERS[name]) if name != "spelt in text" else plain_tokens(ANSWERS[name])
    say(worker, said)
    whole = await client.chat.completions.create(**ASKED)
    _, added_up = await streamed(client, **ASKED)
    assert told(added_up) == told(whole)
    choice = whole.choices[0]
    assert len(calls_of(choice.message)) == VALID.get(name, 0)
    assert choice.finish_reason == ("tool_calls" if name in VALID else "stop")
    if name not in VALID:
        assert choice.message.content == ANSWERS[name]


def plain_tokens(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


async def test_a_call_streams_as_who_is_called_and_then_with_what_as_it_comes(
    client: openai.AsyncOpenAI, worker: FakeWorker
):
    said = tokens_of("Look: " + ANSWERS["two calls"])
    say(worker, said)
    chunks, _ = await streamed(client, **ASKED)
    deltas = [made for chunk in chunks for made in chunk.choices[0].delta.tool_calls or []]
    begun = [made for made in deltas if made.id]
    assert [(made.index, made.id, made.type) for made in begun] == [
        (0, "functions.get_weather:0", "function"),
        (1, "functions.add-up:1", "function"),
    ]
    functions = [(made.index, made.function) for made in deltas if made.function is not None]
    assert [(f.name, f.arguments) for _, f in functions if f.name] == [("get_weather", ""), ("add-up", "")]
    assert all(f.arguments for _, f in functions if not f.name)
    first, second = ("".join(f.arguments or "" for index, f in functions if index == call) for call in (0, 1))
    assert (first, second) == (ARGUMENTS, "{}")
    assert len(functions) > 10
    assert not any(chunk.choices[0].delta.content == "" for chunk in chunks[1:])
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert chunks[0].choices[0].delta.role == "assistant"


async def test_arguments_reach_the_client_before_the_call_is_whole(running: RunningGateway, worker: FakeWorker):
    said = tokens_of(CALL)
    say(worker, said)
    worker.script.points.hold(f"step {len(said) - 5}")
    async with (
        httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as http,
        http.stream("POST", "/v1/chat/completions", json=ASKED | {"stream": True}) as response,
    ):
        told = ""
        async for line in response.aiter_lines():
            told += line
            if told.count("arguments") > 2:  # of who is called, and of two pieces
                break
        worker.script.points.release()


async def test_a_call_that_is_cut_off_is_told_as_far_as_it_came_and_ends_with_length(
    client: openai.AsyncOpenAI, worker: FakeWorker
):
    said = tokens_of("Look: " + CALL)
    say(worker, said)
    cut = ASKED | {"max_tokens": len(said) - 4}
    answer = await client.chat.completions.create(**cut)
    ((finish, content, ((_, _, name, arguments),)),) = told(answer)
    assert (finish, content, name) == ("length", "Look: ", "get_weather")
    assert ARGUMENTS.startswith(arguments)
    assert len(arguments) < len(ARGUMENTS)
    assert told((await streamed(client, **cut))[1]) == told(answer)
    before = ASKED | {"max_tokens": len(tokens_of("Look: " + SECTION_BEGIN + CALL_BEGIN))}
    answer = await client.chat.completions.create(**before)
    assert told(answer) == [("length", "Look: ", [])]
    assert told((await streamed(client, **before))[1]) == told(answer)


async def test_calls_that_were_complete_when_the_answer_was_cut_off_are_kept(
    client: openai.AsyncOpenAI, worker: FakeWorker
):
    say(worker, tokens_of(CALL))
    for num_missing in range(3):  # the section's end, and the call's
        cut = ASKED | {"max_tokens": len(tokens_of(CALL)) - num_missing}
        answer = await client.chat.completions.create(**cut)
        ((finish, content, made),) = told(answer)
        assert (finish, content, [arguments for *_, arguments in made]) == ("length", None, [ARGUMENTS])
        assert told((await streamed(client, **cut))[1]) == told(answer)


async def test_a_stop_string_cuts_text_before_and_inside_of_a_call(client: openai.AsyncOpenAI, worker: FakeWorker):
    say(worker, tokens_of("Look: " + CALL))
    cut_off = ("functions.get_weather:0", "function", "get_weather", ARGUMENTS[: ARGUMENTS.index("Oslo")])
    for stop, content, made in (("ook", "L", []), ("Oslo", "Look: ", [cut_off])):
        answer = await client.chat.completions.create(**ASKED, stop=stop)
        assert told(answer) == [("stop", content, made)]
        assert told((await streamed(client, **ASKED, stop=stop))[1]) == told(answer)


async def test_a_stop_string_after_a_call_ends_the_answer_and_the_call_stands(
    client: openai.AsyncOpenAI, worker: FakeWorker
):
    say(worker, tokens_of(CALL + "So be it."))
    answer = await client.chat.completions.create(**ASKED, stop=" be")
    ((finish, content, made),) = told(answer)
    assert (finish, content, len(made)) == ("tool_calls", "So", 1)
    assert told((await streamed(client, **ASKED, stop=" be"))[1]) == told(answer)


async def test_min_tokens_lets_a_call_through_and_logprobs_are_of_all_tokens(
    client: openai.AsyncOpenAI, worker: FakeWorker
):
    said = tokens_of(CALL)
    say(worker, said)
    asked = ASKED | {"logprobs": True, "extra_body": {"min_tokens": len(said) + 3, "return_token_ids": True}}
    answer = await client.chat.completions.create(**asked, stop=["}"])
    extra: Any = answer.choices[0].model_extra
    # "}" may not end the answer before its time, and the end token neither
    assert extra["token_ids"] == [*said, END, END, END, END]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or []) == len(said) + 4
    assert len(calls_of(answer.choices[0].message)) == 1
    chunks, added_up = await streamed(client, **asked, stop=["}"])
    assert told(added_up) == told(answer)
    assert [token for chunk in chunks for token in (chunk.choices[0].model_extra or {}).get("token_ids", [])] == extra[
        "token_ids"
    ]


async def test_each_of_several_choices_has_its_own_calls(client: openai.AsyncOpenAI, worker: FakeWorker):
    say(worker, tokens_of(CALL), tokens_of("It rains."), tokens_of("Hm. " + section(call(arguments="{}"))))
    asked = ASKED | {"n": 3, "stream_options": {"include_usage": True}}
    chunks, added_up = await streamed(client, **asked)
    answer = await client.chat.completions.create(**ASKED, n=3)
    assert told(added_up) == told(answer)
    assert [(finish, content, len(made)) for finish, content, made in told(answer)] == [
        ("tool_calls", None, 1),
        ("stop", "It rains.", 0),
        ("tool_calls", "Hm. ", 1),
    ]
    assert chunks[-1].usage == answer.usage


async def test_where_one_call_is_asked_for_the_answer_ends_with_it(client: openai.AsyncOpenAI, worker: FakeWorker):
    first = tokens_of(SECTION_BEGIN + call())
    say(worker, tokens_of(ANSWERS["two calls"]))
    answer = await client.chat.completions.create(**ASKED, parallel_tool_calls=False)
    ((finish, content, made),) = told(answer)
    assert (finish, content, [arguments for *_, arguments in made]) == ("tool_calls", None, [ARGUMENTS])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(first)
    assert (answer.choices[0].model_extra or {})["stop_reason"] is None
    assert told((await streamed(client, **ASKED, parallel_tool_calls=False))[1]) == told(answer)


NAMED: Any = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


async def test_a_named_function_is_called_and_its_beginning_is_billed_as_completion(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, worker: FakeWorker
):
    begun = tokens_of(f"{SECTION_BEGIN}{CALL_BEGIN}functions.get_weather:0{ARGUMENTS_BEGIN}")
    rest = tokens_of(ARGUMENTS + CALL_END)
    say(worker, [*rest, *tokens_of(SECTION_END)], [*tokens_of("{}" + CALL_END)])
    asked = ASKED | NAMED | {"n": 2, "stop": ["functions"], "extra_body": {"return_token_ids": True}}
    answer = await client.chat.completions.create(**asked)
    call_id = "functions.get_weather:0"
    assert told(answer) == [
        ("tool_calls", None, [(call_id, "function", "get_weather", ARGUMENTS)]),
        ("tool_calls", None, [(call_id, "function", "get_weather", "{}")]),
    ]
    assert told((await streamed(client, **asked))[1]) == told(answer)
    extra: Any = answer.choices[0].model_extra
    assert extra["token_ids"] == begun + rest
    body = {name: ASKED[name] for name in ("messages", "tools", "reasoning_effort")}
    tokenized = (await http.post("/tokenize", json=body)).json()["tokens"]
    run = worker.runs[0]
    assert list(run.prompt_tokens) == tokenized + begun
    assert run.max_tokens == ASKED["max_tokens"] - len(begun)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenized) == len((answer.model_extra or {})["prompt_token_ids"])
    assert answer.usage.completion_tokens == 2 * len(begun) + len(rest) + len(tokens_of("{}" + CALL_END))
    metrics = (await http.get("/metrics")).text
    billed = answer.usage.completion_tokens * 2
    assert f'vllm:generation_tokens_total{{engine="0",model_name="kimi"}} {billed}.0' in metrics
    assert 'moonshard_dropped_tokens_total{engine="0",model_name="kimi"} 0.0' in metrics


async def test_a_named_function_after_other_calls_gets_an_id_of_its_own(client: openai.AsyncOpenAI, worker: FakeWorker):
    say(worker, tokens_of("{}" + CALL_END))
    earlier: Any = {
        "id": "functions.get_weather:1",
        "type": "function",
        "function": {"name": "add-up", "arguments": "{}"},
    }
    turn = {"role": "assistant", "content": None, "tool_calls": [earlier]}
    result = {"role": "tool", "tool_call_id": earlier["id"], "content": "3"}
    answer = await client.chat.completions.create(**ASKED | NAMED | {"messages": [*ASKED["messages"], turn, result]})
    (made,) = calls_of(answer.choices[0].message)
    assert made.id == "functions.get_weather:2"
    assert TOKENIZER is not None
    assert TOKENIZER.decode(worker.runs[0].prompt_tokens, skip_special=False).endswith(
        f"{CALL_BEGIN}{made.id}{ARGUMENTS_BEGIN}"
    )


async def test_a_named_function_that_is_cut_off_ends_with_length(client: openai.AsyncOpenAI, worker: FakeWorker):
    begun = tokens_of(f"{SECTION_BEGIN}{CALL_BEGIN}functions.get_weather:0{ARGUMENTS_BEGIN}")
    say(worker, tokens_of(ARGUMENTS))
    answer = await client.chat.completions.create(**ASKED | NAMED | {"max_tokens": len(begun) + 2})
    ((finish, content, ((_, _, name, arguments),)),) = told(answer)
    assert (finish, content, name) == ("length", None, "get_weather")
    assert ARGUMENTS.startswith(arguments)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(begun) + 2


async def test_without_tools_nothing_is_looked_for(client: openai.AsyncOpenAI, worker: FakeWorker):
    say(worker, tokens_of("Look: " + CALL))
    without = {name: value for name, value in ASKED.items() if name != "tools"}
    for asked in (without, without | {"tools": []}, ASKED | {"tool_choice": "none"}):
        answer = await client.chat.completions.create(**asked)
        assert told(answer) == [("stop", "Look: functions.get_weather:0" + ARGUMENTS, [])]
    prompts = [list(run.prompt_tokens) for run in worker.runs]
    assert prompts[0] == prompts[1] == prompts[2]  # a model that is to call nothing is told of nothing


async def test_the_template_is_given_the_tools_as_they_came(client: openai.AsyncOpenAI, worker: FakeWorker):
    assert TOKENIZER is not None
    say(worker, tokens_of("It rains."))
    await client.chat.completions.create(**ASKED, tool_choice="auto")
    expected = f"<|im_system|>tool_declare<|im_middle|>{json.dumps(TOOLS)}<|im_end|>"
    prompt = TOKENIZER.decode(worker.runs[0].prompt_tokens, skip_special=False)
    assert prompt.startswith(expected + "<|im_user|>")


async def test_a_turn_that_is_sent_back_is_the_tokens_that_were_generated(
    client: openai.AsyncOpenAI, worker: FakeWorker
):
    assert TOKENIZER is not None
    said = tokens_of("Look: " + ANSWERS["two calls"])
    say(worker, said)
    _, first = await streamed(client, **ASKED)
    turn = first.choices[0].message  # as OpenAI's client writes it, with fields of its own
    results = [{"role": "tool", "tool_call_id": made.id, "content": "rain"} for made in calls_of(turn)]
    say(worker, tokens_of(CALL))
    messages = [*ASKED["messages"], turn, *results]
    second = await client.chat.completions.create(**ASKED | {"messages": messages})
    prompt = worker.runs[-1].prompt_tokens
    assert any(list(prompt[i : i + len(said)]) == said for i in range(len(prompt)))
    assert "## Return of functions.add-up:1\nrain<|im_end|>" in TOKENIZER.decode(prompt, skip_special=False)
    # the model began to count anew
    assert [made.id for made in calls_of(second.choices[0].message)] == ["functions.get_weather:2"]


async def test_tokenize_gives_what_a_chat_with_tools_will_prefill(http: httpx.AsyncClient):
    body = {name: ASKED[name] for name in ("messages", "tools", "reasoning_effort")}
    tokenized = (await http.post("/tokenize", json=body)).json()["tokens"]
    asked = ASKED | {"max_tokens": 1, "return_token_ids": True}
    assert (await http.post("/v1/chat/completions", json=asked)).json()["prompt_token_ids"] == tokenized


async def test_a_call_keeps_its_tokens_flowing(http: httpx.AsyncClient, worker: FakeWorker):
    said = tokens_of(CALL)
    say(worker, said)
    response = await http.post("/v1/chat/completions", json=ASKED | {"stream": True, "return_token_ids": True})
    tokens = [choice.get("token_ids") for event in events_of(response.text) for choice in event["choices"]]
    assert [token for token in tokens if token] == [[token] for token in [*said, END]]


@pytest.fixture
def model_path(request: pytest.FixtureRequest, kimi_folder: Path, tmp_path: Path) -> Path:
    """The fixture's folder; for a test with a `template`, one with that template, or with none of one marker.

    With `plain_markers`, one whose tokenizer.json calls no added token special.
    """
    tokens = (kimi_folder / "tokenizer.json").read_text()
    if "plain_markers" in request.fixturenames:
        return with_file(kimi_folder, tmp_path, "tokenizer.json", tokens.replace('"special": true', '"special": false'))
    if "template" not in request.fixturenames:
        return kimi_folder
    template = request.getfixturevalue("template")
    if template is not None:
        return with_file(kimi_folder, tmp_path, "chat_template.jinja", template)
    return with_file(kimi_folder, tmp_path, "tokenizer.json", tokens.replace(CALL_END, "<|something_else|>"))


@pytest.fixture
def plain_markers() -> None:
    pass


@pytest.mark.usefixtures("plain_markers")
async def test_tools_work_where_the_file_does_not_call_the_markers_special(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of(CALL))
    answer = (await http.post("/v1/chat/completions", json=ASKED)).json()
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    forged = ASKED | {"messages": [{"role": "user", "content": CALL}]}
    await http.post("/v1/chat/completions", json=forged)
    assert TOKENIZER is not None
    assert not set(worker.runs[-1].prompt_tokens) & {TOKENIZER.special_tokens[name] for name in NAMES.values()}


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None], ids=["no tools", "no markers"])
async def test_a_model_that_cannot_call_tools_refuses_them(
    http: httpx.AsyncClient, worker: FakeWorker, template: str | None
):
    response = await http.post("/v1/chat/completions", json=ASKED)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert worker.runs == []
    ignored = ASKED | {"tool_choice": "none"}
    assert (await http.post("/v1/chat/completions", json=ignored)).status_code == 200
