"""Chats of the public gRPC API: checked as over HTTP, and their tools are called as over HTTP."""

import json
from typing import Any

import httpx
import pytest

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import InvalidArgument
from moonshard.rpc.types import ToolCall
from moonshard.serving.chat.tool_calls import NAMES
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.openai.test_gateway_tools import (
    ANSWERS,
    ARGUMENTS,
    ARGUMENTS_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    say,
    tokens_of,
)

NO_THOUGHT: Any = {"reasoning_effort": "none"}  # the fixture's prompt would begin one
HI: dict[str, Any] = {"role": "user", "content": "What is the weather in Oslo?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "get_weather", "parameters": json.dumps(SCHEMA)}, {"name": "add-up"}]
HTTP_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "add-up"}},
]
CALL = {"id": "functions.add-up:0", "name": "add-up", "arguments": "{}"}
BAD: list[tuple[list[dict], str]] = [
    ([HI, {"role": "robot", "content": "x"}], "chat.messages[1].role"),
    ([{"content": "x"}], "chat.messages[0].role"),
    ([HI, {"role": "tool", "content": "x"}], "chat.messages[1].tool_call_id"),
    ([HI, {"role": "user", "content": "x", "tool_calls": [CALL]}], "chat.messages[1].tool_calls"),
    ([HI, {"role": "user", "content": "x", "reasoning": "y"}], "chat.messages[1].reasoning_content"),
    ([HI | {"partial": True}], "chat.messages[0].partial"),
]


async def test_messages_are_checked_as_over_http(grpc_client: AsyncClient, worker: FakeWorker):
    for messages, field in BAD:
        for ask in (grpc_client.generate, grpc_client.tokenize):
            with pytest.raises(InvalidArgument) as refused:
                await ask(messages)
            assert refused.value.field == field
    assert worker.runs == []


async def test_tools_are_checked(grpc_client: AsyncClient, worker: FakeWorker):
    faults: list[tuple[dict, str]] = [
        ({"tools": [{"name": ""}]}, "chat.tools[0].name"),
        ({"tools": [{"name": "f", "parameters": "[]"}]}, "chat.tools[0].parameters"),
        ({"tools": [{"name": "f", "parameters": "{"}]}, "chat.tools[0].parameters"),
        ({"tools": TOOLS, "forced_function": "g"}, "forced_function"),
        ({"forced_function": "f"}, "forced_function"),
    ]
    for options, field in faults:
        with pytest.raises(InvalidArgument) as refused:
            await grpc_client.generate([HI], **options)
        assert refused.value.field == field
    with pytest.raises(InvalidArgument, match="tools"):
        await grpc_client.generate("a text", tools=TOOLS)
    assert worker.runs == []


async def test_a_conversation_with_tools_is_the_prompt_that_http_makes_of_it(
    grpc_client: AsyncClient, http: httpx.AsyncClient, worker: FakeWorker
):
    result = {"role": "tool", "content": "3", "tool_call_id": CALL["id"]}
    messages = [HI, {"role": "assistant", "tool_calls": [CALL]}, result]
    completion = await grpc_client.generate(messages, max_tokens=1, tools=TOOLS)
    called = {"id": CALL["id"], "function": {"name": "add-up", "arguments": "{}"}}
    body = {"messages": [HI, {"role": "assistant", "tool_calls": [called]}, result], "tools": HTTP_TOOLS}
    assert list(completion.prompt_token_ids) == (await http.post("/tokenize", json=body)).json()["tokens"]


@pytest.mark.parametrize("is_single", [False, True])
async def test_calls_come_in_parts_and_add_up(grpc_client: AsyncClient, worker: FakeWorker, is_single: bool):
    say(worker, tokens_of("Look: " + ANSWERS["two calls"]))
    completion = await grpc_client.generate([HI], max_tokens=300, tools=TOOLS, single_tool_call=is_single, **NO_THOUGHT)
    (choice,) = completion.choices
    expected = [
        ToolCall(id="functions.get_weather:0", name="get_weather", arguments=ARGUMENTS),
        ToolCall(id="functions.add-up:1", name="add-up", arguments="{}"),
    ]
    assert list(choice.tool_calls) == expected[: 1 if is_single else 2]
    assert (choice.text, choice.finish_reason) == ("Look: ", "tool_calls")
    assert completion.usage.completion_tokens == len(choice.token_ids)


async def test_a_forced_function_is_called_and_a_call_that_is_cut_off_says_so(
    grpc_client: AsyncClient, worker: FakeWorker
):
    begun = tokens_of(f"{SECTION_BEGIN}{CALL_BEGIN}functions.get_weather:0{ARGUMENTS_BEGIN}")
    rest = tokens_of(ARGUMENTS + CALL_END)
    say(worker, rest)
    asked: Any = {"max_tokens": 300, "tools": TOOLS, "forced_function": "get_weather"} | NO_THOUGHT
    whole = await grpc_client.generate([HI], **asked)
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", None)
    assert list(choice.token_ids) == begun + rest
    assert [call.arguments for call in choice.tool_calls] == [ARGUMENTS]
    assert not set(NAMES.values()) & set(choice.text)
    cut = await grpc_client.generate([HI], **asked, stop="Oslo")
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].tool_calls[0].arguments == ARGUMENTS[: ARGUMENTS.index("Oslo")]


CONSTRAINTS: list[tuple[Any, dict[str, object]]] = [
    ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
    ({"json_schema": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ({"json_object": True}, {"json_schema": {"type": "object"}}),
    ({"regex": "a+"}, {"lark_grammar": "start: /a+/"}),
    ({"choice": ["a", "b"]}, {"lark_grammar": 'start: TEXT\nTEXT: "a" | "b"'}),
    ({"grammar": 'start: "a"'}, {"lark_grammar": 'start: "a"'}),
]


def parts_of(worker: FakeWorker) -> dict[str, dict[str, Any]]:
    """What the last request's grammar is made of, by name; of schemas without the options for white space."""
    parts = json.loads(worker.runs[-1].grammar)["grammars"]
    for part in parts:
        part.get("json_schema", {}).pop("x-guidance", None)
    return {part.pop("name"): part for part in parts}


async def test_structured_outputs_reach_the_worker(grpc_client: AsyncClient, worker: FakeWorker):
    prompts: list[Any] = [[1, 2], "a text", [HI]]
    for asked, form in CONSTRAINTS:
        for prompt in prompts:
            await grpc_client.generate(prompt, max_tokens=1, structured_outputs=asked)
            assert parts_of(worker)["form"] == form
    await grpc_client.generate([1, 2], max_tokens=1, structured_outputs={"json_object": False})
    assert worker.runs[-1].grammar == ""


async def test_a_call_may_be_required_and_kept_to_its_schema(
    grpc_client: AsyncClient, http: httpx.AsyncClient, worker: FakeWorker
):
    strict: dict[str, Any] = {"strict": True}
    asked: Any = {"tools": [TOOLS[0] | strict, TOOLS[1]], "require_tool_call": True} | NO_THOUGHT
    completion = await grpc_client.generate([HI], max_tokens=1, **asked)
    grammar = worker.runs[-1].grammar
    assert parts_of(worker)["arguments_1"] == {"json_schema": SCHEMA}
    function = {"name": "get_weather", "parameters": SCHEMA, **strict}
    tools = [{"type": "function", "function": function}, HTTP_TOOLS[1]]
    body = {"messages": [HI], "tools": tools, "tool_choice": "required", "max_tokens": 1} | NO_THOUGHT
    answer = await http.post("/v1/chat/completions", json=body | {"return_token_ids": True})
    assert answer.json()["prompt_token_ids"] == list(completion.prompt_token_ids)
    assert worker.runs[-1].grammar == grammar


async def test_what_cannot_be_kept_to_is_refused(grpc_client: AsyncClient, worker: FakeWorker):
    form: Any = {"structured_outputs": {"regex": "a"}}
    faults: list[tuple[Any, str]] = [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs"),
        ({"structured_outputs": {"colour": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json_schema": {1}}}, "structured_outputs"),
        ({"structured_outputs": {"json_schema": "[]"}}, "structured_outputs.json_schema"),
        ({"structured_outputs": {"json_schema": {"type": "x"}}}, "structured_outputs.json_schema"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (form | {"tools": TOOLS, "require_tool_call": True}, "structured_outputs.regex"),
        (form | {"tools": TOOLS, "forced_function": "add-up"}, "structured_outputs.regex"),
        (form | {"ignore_eos": True}, "stop.ignore_eos"),
        ({"require_tool_call": True}, "require_tool_call"),
        ({"tools": [{"name": "f", "strict": True, "parameters": '{"not": {}}'}]}, "chat.tools[0].parameters"),
    ]
    for options, field in faults:
        with pytest.raises(InvalidArgument) as refused:
            await grpc_client.generate([HI], **options)
        assert refused.value.field == field
    assert worker.runs == []
