"""The form of an answer through the gateway: what reaches the worker, and what is refused before any is asked."""

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.serving.constrained.grammars import Grammars
from moonshard.serving.constrained.parts import Part
from moonshard.serving.gateway.pipeline import grammars as pipeline
from moonshard.serving.gateway.request import GenerationRequest, TextPrompt
from tests.serving.gateway.conftest import FIXTURE, with_file
from tests.serving.gateway.fake_worker import VOCAB_SIZE, FakeWorker
from tests.serving.gateway.openai.test_gateway_tools import CALL_END, TOOLS, say, tokens_of

TOKENIZER = load_tokenizer(FIXTURE)
assert TOKENIZER is not None
SPECIALS = TOKENIZER.special_tokens
HI = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [HI], "max_tokens": 300, "reasoning_effort": "none"}
PROMPT: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 1}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = {"type": "function", "function": {"name": "find", "parameters": CITY, "strict": True}}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "find"}}}
YES = 'start: TEXT\nTEXT: "yes" | "no"'
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
FORMS: list[tuple[dict[str, Any], object]] = [
    ({"response_format": JSON_FORMAT}, CITY),
    ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ({"response_format": {"type": "json_object", "schema": CITY}}, CITY),
    ({"structured_outputs": {"json": CITY}}, CITY),
    ({"structured_outputs": {"json": json.dumps(CITY), "disable_fallback": True}}, CITY),
    ({"structured_outputs": {"json_object": True, "regex": None}}, {"type": "object"}),
    ({"structured_outputs": {"regex": "a/b+"}}, "start: /a\\/b+/"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, YES),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
    ({"guided_json": CITY}, CITY),
    ({"guided_json": json.dumps(CITY)}, CITY),
    ({"guided_regex": "a/b+"}, "start: /a\\/b+/"),
    ({"guided_choice": ["yes", "no"]}, YES),
    ({"guided_grammar": 'root ::= "a"'}, '%llguidance {}\n\nstart: "a"\n'),
    ({"regex": "a"}, "start: /a/"),
    ({"ebnf": 'root ::= "a"'}, '%llguidance {}\n\nstart: "a"\n'),
    ({"json_schema": CITY}, CITY),
    ({"json_schema": json.dumps(CITY)}, CITY),
    ({"grammar": 'root ::= "a"'}, '%llguidance {}\n\nstart: "a"\n'),
]
NOT = {"type": "object", "properties": {"a/b": {"anyOf": [{"type": "null"}, {"not": {}}]}}}
ENDLESS = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}},
}
DEEP: dict[str, Any] = {}
for _ in range(120):
    DEEP = {"type": "array", "items": DEEP}
SCHEMA = "response_format.json_schema.schema"


def of_schema(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"response_format": {"type": "json_schema"}}, SCHEMA, "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA, "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, SCHEMA, "object"),
    ({"response_format": "json"}, "response_format", "object"),
    (of_schema(NOT), SCHEMA, 'Unimplemented keys: ["not"], at #/properties/a~1b/anyOf/1/not'),
    (of_schema({"type": "string", "format": "x"}), SCHEMA, "Unknown format: x, at #/format"),
    (of_schema({"$ref": "#/$defs/a"}), SCHEMA, "does not exist, at #/$ref"),
    (of_schema({"$ref": "https://example.com/a"}), SCHEMA, "at #/$ref"),
    (of_schema({"type": "string", "pattern": "(a"}), SCHEMA, "unclosed group"),
    (of_schema(ENDLESS), SCHEMA, "no end"),
    (of_schema({"$ref": "#"}), SCHEMA, "no end"),
    (of_schema({"type": "array", "minItems": 1, "items": {"$ref": "#"}}), SCHEMA, "no end"),
    (of_schema({"enum": []}), SCHEMA, "Unsatisfiable"),
    (of_schema(DEEP), SCHEMA, "nested deeper"),
    (of_schema({"type": "string", "description": "x" * 300_000}), SCHEMA, "at most 262144"),
    (of_schema({"type": "object", "properties": {"a": {"type": "objekt"}}}), SCHEMA, "at #/properties/a/type"),
    ({"structured_outputs": {}}, "structured_outputs", "json, json_object, regex"),
    ({"structured_outputs": {"json": CITY, "regex": "a"}}, "structured_outputs.regex", "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "nothing to choose"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "str"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": r"\bx"}, "guided_regex", "lookarounds"),
    ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "too many expressions"),
    ({"guided_regex": "(a{1000}){1000}", "reasoning_effort": "high"}, "guided_regex", "too many expressions"),
    ({"guided_json": [1]}, "guided_json", "array"),
    ({"guided_grammar": "hello"}, "guided_grammar", "neither Lark"),
    ({"guided_grammar": "start: <nope>"}, "guided_grammar", "unknown special token"),
    ({"guided_grammar": "start: start"}, "guided_grammar", "nothing keeps to it"),
    ({"guided_grammar": 'foo: "a"'}, "guided_grammar", "neither Lark"),
    ({"guided_grammar": 'start: "a" b'}, "guided_grammar", "b"),
    ({"grammar": 'root ::= "\\'}, "grammar", "escape"),
    ({"grammar": "root ::= " + "(" * 2_000}, "grammar", "nested too deeply"),
    ({"grammar": 'root ::= "a"\n' + 'x ::= "a"\n' * 600}, "grammar", "512 rules"),
    ({"guided_json": CITY, "guided_regex": "a"}, "guided_regex", "guided_json"),
    (of_schema(CITY) | {"ebnf": 'root ::= "a"'}, "ebnf", SCHEMA),
    ({"guided_json": CITY, "ignore_eos": True}, "ignore_eos", "guided_json"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "not supported"),
]


def grammars_of(worker: FakeWorker) -> dict[str, Any]:
    """What the last request's grammar is made of, by name."""
    found = json.loads(worker.runs[-1].grammar)["grammars"]
    for each in found:
        each.get("json_schema", {}).pop("x-guidance", None)
    return {each["name"]: each.get("lark_grammar", each.get("json_schema")) for each in found}


async def chat(http: httpx.AsyncClient, **asked: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=CHAT | asked)


async def test_each_form_reaches_the_worker_from_either_route(http: httpx.AsyncClient, worker: FakeWorker):
    for asked, form in FORMS:
        for path, body in (("/v1/chat/completions", CHAT | {"max_tokens": 1}), ("/v1/completions", PROMPT)):
            response = await http.post(path, json=body | asked)
            assert response.status_code == 200, (asked, response.text)
            assert grammars_of(worker)["form"] == form
            assert grammars_of(worker)["answer"].startswith("start: @form\n")
            assert "x-moonshard-unknown-fields" not in response.headers


async def test_what_can_be_no_form_is_refused_by_its_field(http: httpx.AsyncClient, worker: FakeWorker):
    faults = []
    for asked, field, words in REFUSED:
        response = await chat(http, **asked)
        error = response.json().get("error", {})
        if (response.status_code, error.get("param")) != (400, field) or words not in error["message"]:
            faults.append((str(asked)[:200], field, response.status_code, error))
    assert faults == []
    assert worker.runs == []


async def test_a_thought_is_left_to_the_model(http: httpx.AsyncClient, worker: FakeWorker):
    await chat(http, **of_schema(CITY), reasoning_effort="high", max_tokens=1)
    assert grammars_of(worker)["answer"].startswith(f"start: TEXT <[{SPECIALS['</think>']}]> @form")


async def test_nothing_is_asked_of_an_answer_without_form_and_tools(http: httpx.AsyncClient, worker: FakeWorker):
    for asked in ({}, {"response_format": {"type": "text"}}, {"tools": [STRICT], "tool_choice": "none"}):
        await chat(http, **asked, max_tokens=1)
        assert worker.runs[-1].grammar == ""


async def test_arguments_keep_to_the_schema_of_a_strict_tool_alone(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of("Hi."))
    response = await chat(http, tools=[*TOOLS, STRICT])
    assert response.status_code == 200
    assert "x-moonshard-strict" not in response.headers
    found = grammars_of(worker)
    assert found.pop("answer").startswith("start: TEXT section?\n")
    assert found == {"arguments": {"type": "object"}, "arguments_1": CITY}
    bare = {"type": "function", "function": {"name": "now", "strict": True}}
    await chat(http, tools=[bare])
    assert grammars_of(worker)["arguments_0"] == {"type": "object", "properties": {}, "additionalProperties": False}


async def test_a_call_may_be_required(http: httpx.AsyncClient, worker: FakeWorker):
    say(
        worker,
        tokens_of("<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{}"),
    )
    for more in ({}, {"parallel_tool_calls": False}):
        response = await chat(http, tools=[STRICT], tool_choice="required", **more)
        assert response.status_code == 200, response.text
        answer = grammars_of(worker)["answer"]
        assert answer.startswith("start: section\n")
        assert ("call+" in answer) == (not more)
    end = SPECIALS[CALL_END]
    assert end in worker.runs[-1].stop_token_ids


async def test_a_named_call_goes_on_with_its_arguments(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, tokens_of(f'{{"city": "Oslo"}}{CALL_END}'))
    for tools, arguments in (
        ([STRICT], CITY),
        ([{"type": "function", "function": {"name": "find"}}], {"type": "object"}),
    ):
        response = await chat(http, tools=[*TOOLS, *tools], **NAMED)
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert grammars_of(worker) == {"answer": f"start: @arguments <[{SPECIALS[CALL_END]}]>", "arguments": arguments}


async def test_with_tools_an_answer_is_calls_or_keeps_to_its_form(http: httpx.AsyncClient, worker: FakeWorker):
    await chat(http, tools=TOOLS, **of_schema(CITY), max_tokens=1)
    assert grammars_of(worker)["answer"].startswith("start: (@form | section)\n")
    for choice in ({"tool_choice": "required"}, NAMED):
        response = await chat(http, tools=[STRICT], **choice, **of_schema(CITY))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, SCHEMA)
        assert "tool_choice" in error["message"]


async def test_the_tool_or_the_form_at_fault_is_named(http: httpx.AsyncClient, worker: FakeWorker):
    bad = {"type": "function", "function": {"name": "bad", "parameters": NOT | {"type": "object"}, "strict": True}}
    for body in ({}, of_schema(CITY)):
        response = await chat(http, tools=[STRICT, bad], **body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")
        assert "#/properties/a~1b/anyOf/1/not" in error["message"]
    text = {"type": "function", "function": {"name": "bad", "parameters": {"type": "string"}, "strict": True}}
    assert (await chat(http, tools=[text])).json()["error"]["param"] == "tools[0].function.parameters.type"
    loose = {"type": "function", "function": {"name": "bad", "parameters": NOT}}
    assert (await chat(http, tools=[loose], max_tokens=1)).status_code == 200  # its schema is not kept to
    assert len(worker.runs) == 1


def test_a_field_within_another_is_spelt_as_the_client_spells_that_one():
    spelling = {"response_format": "text.format", "response_format.json_schema": "text.format"}
    asked = GenerationRequest(request_id="", received_ns=0, prompt=TextPrompt(""), spelling=spelling)
    spelt = {
        SCHEMA: "text.format.schema",
        "response_format.type": "text.format.type",
        "response_formats": "response_formats",
    }
    assert {name: asked.invalid(name, "x").field for name in spelt} == spelt


async def test_a_form_is_of_a_whole_answer(http: httpx.AsyncClient, worker: FakeWorker):
    begun = {"role": "assistant", "content": '{"city":', "partial": True}
    response = await chat(http, messages=[HI, begun], **of_schema(CITY))
    assert (response.status_code, response.json()["error"]["param"]) == (400, SCHEMA)
    assert worker.runs == []


async def test_tools_ask_for_no_grammar_where_the_answer_may_not_end(http: httpx.AsyncClient, worker: FakeWorker):
    response = await chat(http, tools=TOOLS, ignore_eos=True, max_tokens=1)
    assert (response.status_code, worker.runs[-1].grammar) == (200, "")
    response = await chat(http, tools=[STRICT], ignore_eos=True, max_tokens=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "ignore_eos")


async def test_equal_requests_share_a_grammar_that_is_compiled_once(
    http: httpx.AsyncClient, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    compiled: list[str] = []
    matcher = Grammars.matcher
    monkeypatch.setattr(Grammars, "matcher", lambda self, text: compiled.append(text) or matcher(self, text))
    turn = {"role": "assistant", "content": "Hello."}
    for messages in ([HI], [HI, turn, HI]):
        for tools in ([*TOOLS, STRICT], [STRICT, *TOOLS]):
            await chat(http, messages=messages, tools=tools, max_tokens=1)
    assert len({run.grammar for run in worker.runs}) == 1
    assert compiled.count(worker.runs[0].grammar) == 1
    assert len(compiled) == 2  # and the strict tool's arguments by themselves


async def test_what_takes_long_to_compile_delays_nobody_else(
    http: httpx.AsyncClient, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    may_go_on, check = threading.Event(), pipeline._check

    def slowly(grammars: Grammars, grammar: str, parts: Sequence[Part]) -> None:
        may_go_on.wait(30)
        check(grammars, grammar, parts)

    assert (await chat(http, **of_schema(CITY), max_tokens=1)).status_code == 200
    monkeypatch.setattr(pipeline, "_check", slowly)
    slow = asyncio.create_task(chat(http, guided_regex="a", max_tokens=1))
    for asked in ({}, of_schema(CITY)):  # none, and one that is known
        assert (await chat(http, **asked, max_tokens=1)).status_code == 200
    assert not slow.done()
    may_go_on.set()
    assert (await slow).status_code == 200


@pytest.fixture
def model_path(request: pytest.FixtureRequest, kimi_folder: Path, tmp_path: Path) -> Path:
    """The fixture's folder; for tests of one without, a folder with no end token or with no tokenizer."""
    match getattr(request, "param", None):
        case "tokenizer":
            (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": 7}))
            return tmp_path
        case "end token":
            (first := tmp_path / "first").mkdir()
            with_file(kimi_folder, first, "generation_config.json", "{}")
            (second := tmp_path / "second").mkdir()
            config = json.loads((kimi_folder / "config.json").read_text())
            return with_file(first, second, "config.json", json.dumps(without_end(config)))
        case _:
            return kimi_folder


def without_end(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: without_end(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name != "eos_token_id"
    }


@pytest.mark.parametrize("model_path", ["tokenizer", "end token"], indirect=True)
async def test_a_model_without_a_tokenizer_or_an_end_refuses_forms(http: httpx.AsyncClient, worker: FakeWorker):
    response = await http.post("/v1/completions", json=PROMPT | {"guided_json": CITY})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_json")
    assert worker.runs == []
    assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200


@pytest.mark.parametrize("model_path", ["end token"], indirect=True)
async def test_a_model_without_an_end_takes_tools_that_ask_for_nothing(http: httpx.AsyncClient, worker: FakeWorker):
    assert (await chat(http, tools=TOOLS, max_tokens=1)).status_code == 200
    assert worker.runs[-1].grammar == ""
    for asked, field in (
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [STRICT]}, "tools[0].function.parameters"),
    ):
        response = await chat(http, **asked)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
