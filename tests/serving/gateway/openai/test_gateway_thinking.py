"""Thinking through the gateway: switched by any of its fields, told apart in answers, sent back by the template."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import InvalidArgument
from tests.serving.gateway.conftest import FIXTURE, with_file
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.openai.test_gateway_tools import CALL, TOOLS, say, tokens_of
from tests.serving.gateway.sse import events_of

TEMPLATES = FIXTURE.parent / "templates"
TOKENIZER = load_tokenizer(FIXTURE)
assert TOKENIZER is not None
BEGIN, END = TOKENIZER.special_tokens["<think>"], TOKENIZER.special_tokens["</think>"]
HI: dict[str, Any] = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"messages": [HI], "max_tokens": 300}
EMPTY = [BEGIN, END]


@pytest.fixture
def form(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "kimi_k26")


@pytest.fixture
def model_path(form: str, tmp_path: Path) -> Path:
    return with_file(FIXTURE, tmp_path, "chat_template.jinja", (TEMPLATES / f"{form}.jinja").read_text())


async def chat(http: httpx.AsyncClient, **asked: Any) -> dict[str, Any]:
    response = await http.post("/v1/chat/completions", json=ASKED | asked)
    assert response.status_code == 200, response.text
    return response.json()


SWITCHES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"reasoning_effort": None}, True),
    *(({"reasoning_effort": effort}, True) for effort in ("low", "medium", "high", "xhigh")),
    *(({"reasoning_effort": effort}, False) for effort in ("none", "minimal")),
    ({"thinking": {"type": "disabled"}}, False),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True),
    ({"thinking": False}, False),
    ({"enable_thinking": False}, False),
    ({"enable_thinking": True, "reasoning_effort": "none"}, True),
    ({"chat_template_kwargs": {"thinking": False}}, False),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, True),
    ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, False),
    ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, True),
    ({"chat_template_kwargs": {"thinking": None}}, True),
    ({"chat_template_kwargs": {"thinking": None, "preserve_thinking": None}, "reasoning_effort": "none"}, False),
]


@pytest.mark.parametrize(("asked", "is_on"), SWITCHES)
async def test_thinking_is_switched_by_any_field_and_the_templates_own_word_goes_first(
    http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any], is_on: bool
):
    say(worker, tokens_of("Hm.</think>Hello."))
    answer = await chat(http, **asked)
    prompt = list(worker.runs[-1].prompt_tokens)
    assert (prompt[-1] == BEGIN) == is_on
    assert (prompt[-2:] == EMPTY) == (not is_on)
    message = answer["choices"][0]["message"]
    if is_on:
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hello.")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(tokens_of("Hm."))}
    else:  # what is generated is told as it is
        assert "reasoning_content" not in message
        assert "completion_tokens_details" not in answer["usage"]
    body = {key: value for key, value in (ASKED | asked).items() if key != "max_tokens"}
    assert (await http.post("/tokenize", json=body)).json()["tokens"] == prompt


async def test_a_stream_tells_thoughts_before_the_answer_and_adds_up_to_the_whole(
    http: httpx.AsyncClient, worker: FakeWorker
):
    say(worker, tokens_of("What is 🌧?\n</think>\nRain."))
    whole = (await chat(http))["choices"][0]
    asked = ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of((await http.post("/v1/chat/completions", json=asked)).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole["message"][name]
    told = [name for delta in deltas[1:] for name in delta]
    assert told == sorted(told, reverse=True)  # all of the thought, then all of the content
    assert whole["message"]["reasoning_content"] == "What is 🌧?\n"
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokens_of("What is 🌧?\n"))


async def test_calls_end_a_thought_and_a_thought_that_is_cut_off_is_no_content(
    http: httpx.AsyncClient, worker: FakeWorker
):
    say(worker, tokens_of("I look." + CALL))
    choice = (await chat(http, tools=TOOLS))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "I look."
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1
    choice = (await chat(http, max_tokens=2))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["reasoning_content"]
    say(worker, tokens_of("Hm."))
    answer = await chat(http)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokens_of("Hm."))


@pytest.mark.parametrize(
    ("form", "thought"),
    [("kimi_k26", [END]), ("kimi_k2_thinking", EMPTY), ("kimi_k2", [])],
    indirect=["form"],
)
async def test_a_function_that_is_forced_is_called_without_a_thought(
    http: httpx.AsyncClient, worker: FakeWorker, thought: list[int]
):
    say(worker, tokens_of("{}<|tool_call_end|>"))
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = await chat(http, tools=TOOLS, tool_choice=named, return_token_ids=True)
    choice = answer["choices"][0]
    assert [made["function"]["arguments"] for made in choice["message"]["tool_calls"]] == ["{}"]
    assert "reasoning_content" not in choice["message"]
    assert answer["usage"].get("completion_tokens_details", {"reasoning_tokens": 0}) == {"reasoning_tokens": 0}
    begun = tokens_of("<|tool_calls_section_begin|><|tool_call_begin|>")
    assert choice["token_ids"][: len(thought) + 2] == thought + begun
    assert list(worker.runs[-1].prompt_tokens[len(answer["prompt_token_ids"]) :])[: len(thought) + 2] == thought + begun


async def test_a_turn_that_is_sent_back_within_a_loop_of_calls_is_what_was_generated(
    http: httpx.AsyncClient, worker: FakeWorker
):
    say(worker, tokens_of("I look.</think>" + CALL))
    message = (await chat(http, tools=TOOLS))["choices"][0]["message"]
    computed = [*worker.runs[-1].prompt_tokens, *tokens_of("I look.</think>" + CALL)]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    await chat(http, tools=TOOLS, messages=[HI, message, result])
    assert list(worker.runs[-1].prompt_tokens[: len(computed)]) == computed


@pytest.mark.parametrize("keep", [{"thinking": {"keep": "all"}}, {"chat_template_kwargs": {"preserve_thinking": True}}])
async def test_thoughts_of_earlier_turns_are_dropped_or_kept_as_is_asked(
    http: httpx.AsyncClient, worker: FakeWorker, keep: dict[str, Any]
):
    turn = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}
    for asked, thought in (({}, ""), (keep, "Hm.")):
        await chat(http, messages=[HI, turn, HI], **asked)
        assert TOKENIZER is not None
        prompt = TOKENIZER.decode(worker.runs[-1].prompt_tokens, skip_special=False)
        assert f"<think>{thought}</think>Hello." in prompt


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("kimi_k26", {"thinking": {"type": "sometimes"}}, "thinking.type"),
    ("kimi_k26", {"thinking": {"keep": "some"}}, "thinking.keep"),
    ("kimi_k26", {"thinking": {"budget_tokens": 100}}, "thinking.budget_tokens"),
    ("kimi_k26", {"thinking": "yes"}, "thinking"),
    ("kimi_k26", {"chat_template_kwargs": {"thinking": "false"}}, "chat_template_kwargs"),
    ("kimi_k26", {"chat_template_kwargs": {"preserve_thinking": 1}}, "chat_template_kwargs"),
    ("kimi_k25", {"thinking": {"keep": "all"}}, "thinking"),
    ("kimi_k2_thinking", {"thinking": {"type": "disabled"}}, "thinking"),
    ("kimi_k2_thinking", {"reasoning_effort": "none"}, "reasoning_effort"),
    ("kimi_k2", {"thinking": {"type": "enabled"}}, "thinking"),
    ("kimi_k2", {"enable_thinking": True}, "enable_thinking"),
    ("kimi_k2_thinking", {"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs"),
    ("kimi_k25", {"chat_template_kwargs": {"preserve_thinking": True}}, "chat_template_kwargs"),
    ("kimi_k2", {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("form", "asked", "field"), REFUSED, indirect=["form"])
async def test_what_the_template_cannot_do_is_refused_by_its_name(
    http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any], field: str
):
    response = await http.post("/v1/chat/completions", json=ASKED | asked)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert worker.runs == []


@pytest.mark.parametrize("form", ["kimi_k2"], indirect=True)
@pytest.mark.parametrize("asked", [{"reasoning_effort": "high"}, {"reasoning_effort": "none"}, {"thinking": False}])
async def test_a_model_that_never_thinks_takes_wishes_and_its_answers_are_text(
    http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any]
):
    say(worker, tokens_of("Hello."))
    assert (await chat(http, **asked))["choices"][0]["message"]["content"] == "Hello."


@pytest.mark.parametrize("form", ["kimi_k2_thinking"], indirect=True)
async def test_a_model_that_begins_its_thought_itself_is_understood(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of("<think>Hm.</think>Hello."))
    message = (await chat(http))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hello.")


async def test_a_tool_that_cannot_be_declared_is_named(http: httpx.AsyncClient, worker: FakeWorker):
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    response = await http.post("/v1/chat/completions", json=ASKED | {"tools": [tool]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "'look_up'" in error["message"]
    assert worker.runs == []


async def test_grpc_tells_thoughts_apart_and_switches_them_as_http_does(
    grpc_client: AsyncClient, http: httpx.AsyncClient, worker: FakeWorker
):
    say(worker, tokens_of("Hm.</think>Hello."))
    completion = await grpc_client.generate([HI], max_tokens=300)
    (choice,) = completion.choices
    assert (choice.reasoning, choice.text) == ("Hm.", "Hello.")
    assert completion.usage.reasoning_tokens == len(tokens_of("Hm."))
    switched_off: list[Any] = [{"reasoning_effort": "none"}, {"template_kwargs": {"thinking": False}}]
    for options in switched_off:
        completion = await grpc_client.generate([HI], max_tokens=300, **options)
        assert list(completion.prompt_token_ids[-2:]) == EMPTY
        assert (completion.choices[0].reasoning, completion.usage.reasoning_tokens) == ("", None)
    turn = {"role": "assistant", "content": "Hello.", "reasoning": "Hm."}
    kept = await grpc_client.generate([HI, turn, HI], max_tokens=1, template_kwargs={"preserve_thinking": True})
    body = {"messages": [HI, turn, HI], "thinking": {"keep": "all"}}
    assert list(kept.prompt_token_ids) == (await http.post("/tokenize", json=body)).json()["tokens"]


async def test_grpc_refuses_what_no_template_can_take_by_its_own_names(grpc_client: AsyncClient, worker: FakeWorker):
    faults: list[dict[str, Any]] = [
        {"template_kwargs": {"thinking": "no"}},
        {"template_kwargs": {"tools": []}, "tools": [{"name": "f"}]},
    ]
    for options in faults:
        with pytest.raises(InvalidArgument) as refused:
            await grpc_client.generate([HI], **options)
        assert refused.value.field == "chat.template_kwargs"
    with pytest.raises(InvalidArgument, match="only a chat"):
        await grpc_client.generate("a text", reasoning_effort="none")
    assert worker.runs == []
