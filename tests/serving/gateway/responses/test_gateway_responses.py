"""OpenAI's Responses API, asked for with OpenAI's own client: what a stream adds up to is the whole response."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.serving.gateway.pipeline.choice import CallsMade
from moonshard.serving.gateway.process import RunningGateway
from moonshard.serving.gateway.responses.answers import Answer, Envelope, Whole
from moonshard.serving.gateway.responses.events import Events
from tests.serving.gateway.conftest import FIXTURE, with_file
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, FakeWorker
from tests.serving.gateway.openai.test_gateway_tools import ANSWERS, ARGUMENTS, CALL, TOOLS, say, tokens_of
from tests.serving.gateway.test_gateway_blocks import STEPS, Step, events_of

URL = "/v1/responses"
QUESTION = "What is the weather in Oslo?"
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASKED: Any = {"model": "kimi", "input": QUESTION, "tools": FLAT_TOOLS, "max_output_tokens": 300}
OWN = ("id", "created_at", "sequence_number", "item_id")  # no two responses have the same


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A model that thinks first, and that may be told not to."""
    return with_file(
        FIXTURE, tmp_path, "chat_template.jinja", (FIXTURE.parent / "templates" / "kimi_k26.jinja").read_text()
    )


@pytest.fixture
async def client(running: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{running.http}/v1", api_key="-", max_retries=0, http_client=transport
    ) as client:
        yield client


def plain(value: Any) -> Any:
    """A response or an event without what is its own."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in OWN}
    return value


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> list[Any]:
    return [event.to_dict() async for event in await client.responses.create(**asked, stream=True)]


def added_up(events: list[Any]) -> list[Any]:
    """The output by its pieces alone: what the last events repeat is left aside."""
    items: list[Any] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(json.loads(json.dumps(event["item"])))
            case "response.content_part.added":
                assert event["content_index"] == len(items[-1]["content"])
                items[-1]["content"].append(dict(event["part"]))
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case _:
                continue
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
    return items


def without_status(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in plain(item).items() if name != "status"} for item in items]


@pytest.mark.parametrize("thought", ["Hm.</think>", "</think>"])
@pytest.mark.parametrize("said", ANSWERS.values(), ids=list(ANSWERS))
async def test_a_stream_adds_up_to_the_whole(client: openai.AsyncOpenAI, worker: FakeWorker, thought: str, said: str):
    say(worker, tokens_of(thought + said))
    whole = (await client.responses.create(**ASKED)).to_dict()
    events = await streamed(client, **ASKED)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert plain(events[-1]["response"]) == plain(whole)
    assert without_status(added_up(events)) == without_status(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert {event["response"]["id"] for event in events if "response" in event} == {events[-1]["response"]["id"]}


@given(STEPS)
def test_whatever_steps_give_a_stream_adds_up_to_the_whole(steps: list[Step]):
    kept: list[bytes] = []
    envelope = Envelope(id="resp_1", model="kimi", asked={}, created_at=0)
    first, second = (Answer(envelope, lambda _, response: kept.append(response)) for _ in range(2))
    whole, events = Whole(first), Events(second)
    summary = pb.Summary(usage=pb.Usage(prompt_tokens=3, completion_tokens=2))
    told = b""
    for event in events_of(steps):
        whole.add(event)
        told += events.calls(event) if isinstance(event, CallsMade) else events.delta(event)
    body = whole.body(summary)
    decoded = [json.loads(line[6:]) for line in (told + events.last(summary)).splitlines() if line[:6] == b"data: "]
    assert kept == [body, body]
    assert decoded[-1]["response"] == json.loads(body)
    assert without_status(added_up(decoded)) == without_status(json.loads(body)["output"])


async def test_an_answer_is_its_thought_its_text_and_its_calls(client: openai.AsyncOpenAI, worker: FakeWorker):
    worker.script.cached_tokens, worker.script.cached_by_tier = 16, {"host": 12}
    said = tokens_of("Hm.</think>" + ANSWERS["text before"])
    say(worker, said)
    answer = await client.responses.create(**ASKED, metadata={"of": "mine"}, instructions="Be brief.")
    thought, message, call = answer.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content or ()] == ["Hm."]
    assert message.type == "message"
    assert answer.output_text == "Let me look. "
    assert call.type == "function_call"
    assert (call.call_id, call.name, call.arguments) == ("functions.get_weather:0", "get_weather", ARGUMENTS)
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert (answer.metadata, answer.instructions, answer.max_output_tokens) == ({"of": "mine"}, "Be brief.", 300)
    assert [tool.to_dict()["name"] for tool in answer.tools] == ["get_weather", "add-up"]
    usage = answer.usage
    assert usage is not None
    assert usage.input_tokens == len(worker.runs[0].prompt_tokens)
    assert usage.input_tokens_details.cached_tokens == 16
    assert usage.input_tokens_details.to_dict()["cached_tokens_details"] == {"device": 4, "host": 12}
    assert usage.output_tokens == len(said) + 1  # with the one that ends it
    assert usage.output_tokens_details.reasoning_tokens == len(tokens_of("Hm."))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_the_events_of_a_stream_come_in_openais_order(client: openai.AsyncOpenAI, worker: FakeWorker):
    say(worker, tokens_of("Hm.</think>Look: " + CALL))
    names = [event["type"].removeprefix("response.") for event in await streamed(client, **ASKED)]
    runs = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert runs == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


async def test_openais_own_stream_helper_follows_it(client: openai.AsyncOpenAI, worker: FakeWorker):
    say(worker, tokens_of("Hm.</think>Look: " + ANSWERS["two calls"]))
    whole = await client.responses.create(**ASKED)
    async with client.responses.stream(**ASKED) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text == whole.output_text
    calls = [item for item in final.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == [ARGUMENTS, "{}"]


@pytest.mark.parametrize("num_tokens", [1, 2, 6])
async def test_an_answer_that_was_cut_off_is_incomplete(
    client: openai.AsyncOpenAI, worker: FakeWorker, num_tokens: int
):
    say(worker, tokens_of("Hm, so.</think>" + CALL))
    asked = ASKED | {"max_output_tokens": num_tokens}
    answer = await client.responses.create(**asked)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert {item.to_dict()["status"] for item in answer.output[-1:]} <= {"incomplete"}
    events = await streamed(client, **asked)
    assert events[-1]["type"] == "response.incomplete"
    assert plain(events[-1]["response"]) == plain(answer.to_dict())


async def test_an_answer_of_nothing_is_an_empty_message(client: openai.AsyncOpenAI, worker: FakeWorker):
    say(worker, tokens_of("</think>"))
    answer = await client.responses.create(**ASKED)
    (message,) = answer.to_dict()["output"]
    assert isinstance(message, dict)
    assert (message["type"], message["status"], answer.output_text) == ("message", "completed", "")
    assert plain((await streamed(client, **ASKED))[-1]["response"]) == plain(answer.to_dict())


async def test_a_turn_sent_back_is_the_chats_turn(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, worker: FakeWorker
):
    say(worker, tokens_of("Hm.</think>Look: " + ANSWERS["two calls"]))
    first = await client.responses.create(**ASKED, instructions="Be brief.")
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    say(worker, tokens_of("</think>It rains."))
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}, *first.output]
    rest = ASKED | {"instructions": "Be brief."}
    await client.responses.create(**rest | {"input": [*history, *results]})
    await client.responses.create(**rest | {"input": results, "previous_response_id": first.id})
    made = [{"id": each.call_id, "function": {"name": each.name, "arguments": each.arguments}} for each in calls]
    turn = {"role": "assistant", "reasoning_content": "Hm.", "content": "Look: ", "tool_calls": made}
    tools = [{"role": "tool", "tool_call_id": each.call_id, "content": "rain"} for each in calls]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}, turn, *tools]
    chat = await http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS, "max_tokens": 300})
    assert chat.status_code == 200, chat.text
    by_items, by_id, by_chat = (list(run.prompt_tokens) for run in worker.runs[1:])
    assert by_items == by_id == by_chat


async def test_effort_tools_and_sampling_mean_what_a_chats_do(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, worker: FakeWorker
):
    say(worker, tokens_of("It rains."))
    same: Any = {"temperature": 0.5, "top_p": 0.25, "parallel_tool_calls": False}
    chat = {"messages": [{"role": "user", "content": QUESTION}], "tools": TOOLS, "max_tokens": 30} | same
    choice: Any = {"type": "function", "name": "get_weather"}
    asked = ASKED | {"max_output_tokens": 30} | same
    await client.responses.create(**asked, reasoning={"effort": "none"}, tool_choice=choice, extra_body={"top_k": 3})
    named = {"type": "function", "function": {"name": "get_weather"}}
    await http.post("/v1/chat/completions", json=chat | {"reasoning_effort": "none", "tool_choice": named, "top_k": 3})
    ours, chats = worker.runs
    for run in (ours, chats):
        run.sampling.seed = 0
        run.request_id = b""
    assert ours == chats


async def test_a_failure_is_told_by_its_status_or_by_the_last_event(client: openai.AsyncOpenAI, worker: FakeWorker):
    worker.script.failure = link_pb2.Failed(code=8, message="the queue is full", retry_after_s=2.5)
    with pytest.raises(openai.RateLimitError):
        await streamed(client, **ASKED)
    worker.script.failure = None
    worker.script.fail_after_tokens = 5
    say(worker, tokens_of("Hm.</think>It rains in Oslo."))
    events = await streamed(client, **ASKED)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "the device failed" in response["error"]["message"]
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response["id"])


ITEM = {"type": "message", "role": "user"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
UNSERVED = {"type": "function", "name": "f", "strict": True, "parameters": UNIQUE}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [ITEM | {"content": [{"type": "input_image", "image_url": "https://x/y.png"}]}]}, "input[0].content[0]"),
    ({"input": [ITEM | {"content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "f"}]}, "input[0].output"),
    ({"input": [{"type": "function_call_output", "call_id": "", "output": "a"}]}, "input[0].call_id"),
    (
        {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}]},
        "input[0].encrypted_content",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": MAX_CONTEXT_TOKENS + 1}, "max_output_tokens"),
    ({"input": "a " * MAX_CONTEXT_TOKENS}, "input"),
    ({"temperature": 9}, "temperature"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"tools": [UNSERVED], "tool_choice": "required"}, "tools[0].parameters"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
]


@pytest.mark.parametrize(("asked", "name"), REFUSED, ids=[f"{name} {i}" for i, (_, name) in enumerate(REFUSED)])
async def test_what_is_not_served_is_refused_by_the_clients_own_name(
    http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any], name: str
):
    for stream in (False, True):
        response = await http.post(URL, json=ASKED | asked | {"stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name), error
        assert name in error["message"]
    assert worker.runs == []


async def test_what_asks_for_nothing_is_accepted_and_what_is_unknown_is_named(http: httpx.AsyncClient):
    nothing = {
        "truncation": "disabled",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto", "effort": None},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "service_tier": "auto",
        "metadata": None,
        "top_logprobs": None,
    }
    response = await http.post(URL, json=ASKED | nothing)
    assert response.status_code == 200, response.text
    assert "x-moonshard-unknown-fields" not in response.headers
    response = await http.post(URL, json=ASKED | {"colour": 1, "reasoning": {"hue": 2}})
    assert response.headers["x-moonshard-unknown-fields"] == "colour, reasoning.hue"


async def test_a_client_that_leaves_in_the_middle_cancels(running: RunningGateway, worker: FakeWorker):
    worker.script.max_tokens_sent = 4
    async with (
        httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as http,
        http.stream("POST", URL, json=ASKED | {"stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            if "response.in_progress" in line:
                break
    await asyncio.wait_for(worker.cancel_seen.wait(), 5)
    await asyncio.wait_for(running.gateway.wait_idle(), 5)
    assert worker.finished == []


async def test_a_required_call_and_a_schema_reach_the_workers_as_a_grammar(http: httpx.AsyncClient, worker: FakeWorker):
    tool = {"type": "function", "name": "find", "strict": True, "parameters": CITY}
    text = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    for asked in ({"tools": [tool], "tool_choice": "required"}, {"text": text}):
        worker.runs.clear()
        assert (await http.post(URL, json=ASKED | asked)).status_code == 200
        (run,) = worker.runs
        assert '"json_schema":' + json.dumps(CITY, separators=(",", ":"))[:-1] in run.grammar


async def test_a_choice_that_is_no_utf_8_is_refused(http: httpx.AsyncClient):
    body = json.dumps(ASKED).encode()[:-1] + b',"tool_choice":{"type":"function","name":"\xff"}}'
    response = await http.post(URL, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
