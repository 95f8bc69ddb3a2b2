"""Anthropic's Messages API: what a stream adds up to is the whole message, and what a client sends back is its turn."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.config.tenants import hash_key
from moonshard.serving.gateway.messages.answers import Answer, Events, Whole
from moonshard.serving.gateway.pipeline.choice import CallsMade
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE, make_config, with_file
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, FakeWorker
from tests.serving.gateway.openai.test_gateway_tools import ANSWERS, ARGUMENTS, CALL, TOOLS, say, tokens_of
from tests.serving.gateway.test_gateway_blocks import STEPS, Step
from tests.serving.gateway.test_gateway_blocks import events_of as pipeline_events_of

URL = "/v1/messages"
QUESTION = {"role": "user", "content": "What is the weather in Oslo?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
OUR_TOOLS: list[Any] = [
    {"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA},
    {"name": "add-up", "type": "custom"},
]
ASKED: Any = {"model": "kimi", "messages": [QUESTION], "tools": OUR_TOOLS, "max_tokens": 300}
CHAT: Any = {"model": "kimi", "messages": [QUESTION], "tools": TOOLS, "max_tokens": 300}


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A model that thinks first, and that may be told not to."""
    return with_file(
        FIXTURE, tmp_path, "chat_template.jinja", (FIXTURE.parent / "templates" / "kimi_k26.jinja").read_text()
    )


async def ask(http: httpx.AsyncClient, **asked: Any) -> dict[str, Any]:
    response = await http.post(URL, json=ASKED | asked)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(http: httpx.AsyncClient, **asked: Any) -> list[dict[str, Any]]:
    """The events, each of which is called what it says that it is."""
    response = await http.post(URL, json=ASKED | asked | {"stream": True})
    assert response.status_code == 200, response.text
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    *blocks, last = text.split("\n\n")
    assert last == ""
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events: list[dict[str, Any]], *, are_objects: bool = True) -> dict[str, Any]:
    """The message by its pieces; `are_objects`: the arguments of its calls."""
    message = dict(events[0]["message"])
    arguments: dict[int, str] = {}
    content, is_open = message["content"], False
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert (event["index"], is_open) == (len(content), False)
                content.append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert (event["index"], is_open) == (len(content) - 1, True)
                kind, block = event["delta"].pop("type"), content[-1]
                ((name, piece),) = event["delta"].items()
                if kind == "input_json_delta":
                    arguments[event["index"]] = arguments.get(event["index"], "") + piece
                else:
                    block[name] += piece
            case "content_block_stop":
                assert (event["index"], is_open) == (len(content) - 1, True)
                is_open = False
            case "message_delta":
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
            case name:
                assert name in ("ping", "message_stop")
    for index, text in arguments.items() if are_objects else ():
        content[index]["input"] = json.loads(text)
    assert not is_open
    return message


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "id"}


@pytest.mark.parametrize("thought", ["Hm.</think>", "</think>"])
@pytest.mark.parametrize("said", ANSWERS.values(), ids=list(ANSWERS))
async def test_a_stream_adds_up_to_the_whole(http: httpx.AsyncClient, worker: FakeWorker, thought: str, said: str):
    worker.script.cached_tokens = 16
    say(worker, tokens_of(thought + said))
    events = await streamed(http)
    assert without_id(added_up(events)) == without_id(await ask(http))
    assert events[-1] == {"type": "message_stop"}


@given(STEPS)
def test_whatever_steps_give_a_stream_adds_up_to_the_whole(steps: list[Step]):
    whole, events = Whole(Answer("msg_1", "kimi")), Events(Answer("msg_1", "kimi"))
    summary = pb.Summary(usage=pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1))
    told = b""
    for event in pipeline_events_of(steps):
        whole.add(event)
        told += events.calls(event) if isinstance(event, CallsMade) else events.delta(event)
    told += events.last(summary)
    expected = json.loads(whole.body(summary))
    for block in expected["content"]:
        block.pop("input", None)  # most of what is made up here is no object
    message = added_up(events_of(told.decode()), are_objects=False)
    for block in message["content"]:
        block.pop("input", None)
    assert message == expected


async def test_an_answer_is_its_thought_its_text_and_its_calls(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.cached_tokens = 16
    said = tokens_of("Hm.</think>" + ANSWERS["text before"])
    say(worker, said)
    message = await ask(http)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "text", "text": "Let me look. "},
        {
            "type": "tool_use",
            "id": "functions.get_weather:0",
            "name": "get_weather",
            "input": json.loads(ARGUMENTS),
        },
    ]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "kimi")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": len(worker.runs[0].prompt_tokens) - 16,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": len(said) + 1,  # with the one that ends it
    }


async def test_the_events_of_a_stream_come_in_anthropics_order(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of("Hm.</think>Look: " + CALL))
    events = await streamed(http)
    names = [event.get("delta", {}).get("type") or event["type"] for event in events]
    runs = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert runs == [
        *("message_start", "ping"),
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    opening = events[0]["message"]
    assert (opening["content"], opening["stop_reason"]) == ([], None)
    assert opening["usage"]["input_tokens"] == len(worker.runs[0].prompt_tokens)


@pytest.mark.parametrize(
    ("said", "asked", "reason", "sequence"),
    [
        ("It rains.", {}, "end_turn", None),
        ("It rains.", {"max_tokens": 3}, "max_tokens", None),
        ("It rains. So", {"stop_sequences": ["x", " So"]}, "stop_sequence", " So"),
        (CALL, {}, "tool_use", None),
        (CALL + "So be it.", {"stop_sequences": [" be"]}, "tool_use", None),
    ],
)
async def test_why_an_answer_ended(
    http: httpx.AsyncClient, worker: FakeWorker, said: str, asked: dict[str, Any], reason: str, sequence: str | None
):
    say(worker, tokens_of(said))
    asked = {"thinking": {"type": "disabled"}} | asked
    message = await ask(http, **asked)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert without_id(added_up(await streamed(http, **asked))) == without_id(message)


async def test_a_call_that_was_cut_off_has_no_input(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of("</think>" + CALL))
    cut = {"max_tokens": len(tokens_of("</think>" + CALL)) - 4}
    message = await ask(http, **cut)
    assert (message["stop_reason"], message["content"][0]["input"]) == ("max_tokens", {})
    events = await streamed(http, **cut)
    told = "".join(e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta")
    assert told
    assert ARGUMENTS.startswith(told)


async def test_a_conversation_is_the_chat_of_its_blocks(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of("</think>It rains."))
    arguments = [{"city": "Oslo \u00f8", "n": 1.0}, {}]
    uses = [
        {"type": "tool_use", "id": f"functions.get_weather:{index}", "name": "get_weather", "input": arguments[index]}
        for index in range(2)
    ]
    cached = {"cache_control": {"type": "ephemeral"}}
    thoughts = [{"type": "thinking", "thinking": text, "signature": "s"} for text in ("I ", "look.")]
    turn = {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "Look: "}, *uses]}
    results = [
        {"type": "tool_result", "tool_use_id": uses[0]["id"], "content": "rain"} | cached,
        {
            "type": "tool_result",
            "tool_use_id": uses[1]["id"],
            "content": [{"type": "text", "text": "no"}],
            "is_error": True,
        },
        {"type": "text", "text": "And "},
        {"type": "text", "text": "now?"} | cached,
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."} | cached]
    response = await http.post(
        URL, json=ASKED | {"system": system, "messages": [QUESTION, turn, {"role": "user", "content": results}]}
    )
    assert response.status_code == 200, response.text
    assert "x-moonshard-unknown-fields" not in response.headers
    calls = [
        {"id": use["id"], "function": {"name": use["name"], "arguments": json.dumps(said, ensure_ascii=False)}}
        for use, said in zip(uses, arguments, strict=True)
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "reasoning_content": "I look.", "content": "Look: ", "tool_calls": calls},
        {"role": "tool", "tool_call_id": uses[0]["id"], "content": "rain"},
        {"role": "tool", "tool_call_id": uses[1]["id"], "content": "no"},
        {"role": "user", "content": "And now?"},
    ]
    assert (await http.post("/v1/chat/completions", json=CHAT | {"messages": messages})).status_code == 200
    ours, chats = (list(run.prompt_tokens) for run in worker.runs)
    assert ours == chats


async def test_a_thought_after_a_call_begins_a_turn_of_its_own(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of("</think>It rains."))
    uses = [
        {"type": "tool_use", "id": f"functions.add-up:{index}", "name": "add-up", "input": {}} for index in range(2)
    ]
    first, second = ({"type": "thinking", "thinking": text, "signature": ""} for text in ("One.", "Two."))
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "3"} for use in uses]
    content = [first, uses[0], second, uses[1]]
    kept = {"chat_template_kwargs": {"preserve_thinking": True}}
    turns = [QUESTION, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    await ask(http, messages=turns, **kept)
    calls = [{"id": use["id"], "function": {"name": "add-up", "arguments": "{}"}} for use in uses]
    messages = [
        QUESTION,
        *(
            {"role": "assistant", "reasoning_content": thought["thinking"], "content": None, "tool_calls": [made]}
            for thought, made in zip((first, second), calls, strict=True)
        ),
        *({"role": "tool", "tool_call_id": use["id"], "content": "3"} for use in uses),
    ]
    assert (await http.post("/v1/chat/completions", json=CHAT | kept | {"messages": messages})).status_code == 200
    ours, chats = (list(run.prompt_tokens) for run in worker.runs)
    assert ours == chats


NAMED = {"type": "function", "function": {"name": "get_weather"}}
MEANT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "enabled"}}),
    ({"thinking": {"type": "adaptive"}}, {}),
    ({"output_config": {"effort": "none"}}, {"reasoning_effort": "none"}),
    ({"tool_choice": {"type": "tool", "name": "get_weather"}}, {"tool_choice": NAMED}),
    ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"parallel_tool_calls": False}),
    ({"stop_sequences": ["x"], "top_k": 3, "temperature": 0.5}, {"stop": ["x"], "top_k": 3, "temperature": 0.5}),
    (
        {"messages": [QUESTION, {"role": "assistant", "content": "It "}]},
        {"messages": [QUESTION, {"role": "assistant", "content": "It ", "partial": True}]},
    ),
]


@pytest.mark.parametrize(("asked", "chats"), MEANT)
async def test_each_parameter_means_what_the_chats_does(
    http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any], chats: dict[str, Any]
):
    say(worker, tokens_of("It rains."))
    await ask(http, **asked)
    response = await http.post("/v1/chat/completions", json=CHAT | chats)
    assert response.status_code == 200, response.text
    for run in worker.runs:
        run.sampling.seed = 0
        run.request_id = b""
    assert worker.runs[0] == worker.runs[1]


@pytest.mark.parametrize("extra", [{}, {"system": "Be brief."}, {"thinking": {"type": "disabled"}}])
async def test_tokens_are_counted_as_they_will_be_prefilled(
    http: httpx.AsyncClient, worker: FakeWorker, extra: dict[str, Any]
):
    say(worker, tokens_of("It rains."))
    body = {name: value for name, value in (ASKED | extra).items() if name != "max_tokens"}
    counted = await http.post(f"{URL}/count_tokens", json=body)
    assert counted.status_code == 200, counted.text
    await ask(http, **extra)
    assert counted.json() == {"input_tokens": len(worker.runs[0].prompt_tokens)}
    assert len(worker.runs) == 1


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": "assistant", "content": list(blocks)}, QUESTION]}


PICTURE = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
UNSERVED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "critic", "content": "a"}]}, "messages[0].role"),
    (user(PICTURE), "messages[0].content[0].type"),
    (user({"type": "document", "source": {}}), "messages[0].content[0].type"),
    (user({"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}), "messages[0].content[1].type"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "tool_result", "tool_use_id": "a", "content": [PICTURE]}), "messages[0].content[0].content[0].type"),
    (user({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id"),
    (user({"type": "tool_result", "tool_use_id": "", "content": "a"}), "messages[0].content[0].tool_use_id"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
    (assistant({"type": "redacted_thinking", "data": "a"}), "messages[1].content[0].type"),
    (assistant({"type": "server_tool_use", "id": "a", "name": "web_search"}), "messages[1].content[0].type"),
    (assistant({"type": "tool_use", "name": "f", "input": {}}), "messages[1].content[0].id"),
    ({"system": [PICTURE]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "most"}}, "tool_choice.type"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
    ({"tools": [{"name": "f", "strict": True, "input_schema": UNSERVED}]}, "tools[0].input_schema"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": MAX_CONTEXT_TOKENS + 1}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
]


@pytest.mark.parametrize(("asked", "name"), REFUSED, ids=[f"{name} {i}" for i, (_, name) in enumerate(REFUSED)])
async def test_what_is_not_served_is_refused_by_the_clients_own_name(
    http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any], name: str
):
    for stream in (False, True):
        response = await http.post(URL, json=ASKED | asked | {"stream": stream})
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
        assert name in body["error"]["message"]
    assert worker.runs == []


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(http: httpx.AsyncClient):
    long = {"messages": [{"role": "user", "content": "a " * MAX_CONTEXT_TOKENS}]}
    response = await http.post(URL, json=ASKED | long)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt is too long: ")
    counted = await http.post(f"{URL}/count_tokens", json=long)
    assert counted.json()["input_tokens"] > MAX_CONTEXT_TOKENS


async def test_what_is_unknown_is_named(http: httpx.AsyncClient):
    odd = {"colour": 1, **user({"type": "text", "text": "a", "hue": 2})}
    response = await http.post(URL, json=ASKED | odd)
    names = "colour, messages[].content[].hue"
    assert set(response.headers["x-moonshard-unknown-fields"].split(", ")) == set(names.split(", "))
    response = await http.post(f"{URL}/count_tokens", json=ASKED)
    assert response.headers["x-moonshard-unknown-fields"] == "max_tokens"


async def test_errors_have_anthropics_shape_wherever_they_come_from(http: httpx.AsyncClient, worker: FakeWorker):
    def told(response: httpx.Response) -> tuple[int, str]:
        body = response.json()
        assert body["type"] == "error"
        return response.status_code, body["error"]["type"]

    assert told(await http.post(URL, content=b"{")) == (400, "invalid_request_error")
    assert told(await http.post(URL, json=ASKED | {"model": "claude"})) == (404, "not_found_error")
    assert told(await http.get(URL)) == (405, "invalid_request_error")
    assert told(await http.post(f"{URL}/batches", json={})) == (404, "not_found_error")
    worker.script.failure = link_pb2.Failed(code=8, message="the queue is full", retry_after_s=2.5)
    full = await http.post(URL, json=ASKED | {"stream": True})
    assert told(full) == (429, "rate_limit_error")
    assert full.headers["retry-after"] == "3"
    worker.script.failure = link_pb2.Failed(code=13, message="bug")
    assert told(await http.post(URL, json=ASKED)) == (500, "api_error")
    worker.script.failure = None
    worker.script.fail_after_tokens = 5
    events = await streamed(http)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "the device failed" in events[-1]["error"]["message"]


@pytest.mark.parametrize("keep_alive_s", [0.05])
async def test_a_client_that_waits_is_pinged(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of("</think>Hi"))
    worker.script.points.hold("step 0")
    asking = asyncio.create_task(streamed(http))
    await worker.seen(1)
    await asyncio.sleep(0.3)
    worker.script.points.release()
    events = await asking
    assert events[0] == {"type": "ping"}
    assert events[-1] == {"type": "message_stop"}


async def test_a_client_that_leaves_in_the_middle_cancels(running: RunningGateway, worker: FakeWorker):
    worker.script.max_tokens_sent = 4
    async with (
        httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as http,
        http.stream("POST", URL, json=ASKED | {"stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            if "message_start" in line:
                break
    await asyncio.wait_for(worker.cancel_seen.wait(), 5)
    await asyncio.wait_for(running.gateway.wait_idle(), 5)
    assert worker.finished == []


@pytest.mark.parametrize("gateway_config", [GatewayConfig(port=0, grpc_port=0, unknown_fields="refuse")])
async def test_unknown_fields_are_refused_where_the_chats_are(http: httpx.AsyncClient, gateway_config: GatewayConfig):
    response = await http.post(URL, json=ASKED | {"colour": 1})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "colour: this field is unknown")


@pytest.fixture
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(f'[keys]\n{hash_key("one")} = "a"\n')
    return path


async def test_a_key_is_asked_for_in_anthropics_shape(worker: FakeWorker, keys: Path, model_path: Path):
    config = GatewayConfig(port=0, grpc_port=0, drain_timeout_s=1, keys=keys)
    async with (
        fake_worker.serving(worker) as port,
        serving(make_config(config, model_path, [f"127.0.0.1:{port}"])) as running,
        httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as http,
    ):
        await running.gateway.pool.wait_ready()
        refused = await http.post(URL, json=ASKED, headers={"x-api-key": "two"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        say(worker, tokens_of("</think>Hi"))
        assert (await http.post(URL, json=ASKED, headers={"x-api-key": "one"})).status_code == 200


async def test_what_claude_code_asks_of_a_context_unasked_is_taken(http: httpx.AsyncClient, worker: FakeWorker):
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
    answer = await http.post(URL, json=ASKED | {"context_management": {"edits": edits}})
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_any_tool_is_a_required_call_whose_grammar_reaches_the_workers(
    http: httpx.AsyncClient, worker: FakeWorker
):
    tool = {"name": "find", "strict": True, "input_schema": {"type": "object", "properties": {"q": {"const": 7}}}}
    assert (await http.post(URL, json=ASKED | {"tools": [tool], "tool_choice": {"type": "any"}})).status_code == 200
    (run,) = worker.runs
    assert '"const":7' in run.grammar
    assert "functions.find:" in run.grammar
