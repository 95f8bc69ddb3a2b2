"""Every wrong input is answered with a 4xx that names the parameter, and reaches no worker."""

import json

import httpx
import pytest

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import ContextLengthExceeded, InvalidArgument, NotFound
from moonshard.rpc.types import GenerateOptions
from moonshard.serving.gateway.openai.requests import ChatBody, CompletionBody
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.conftest import MAX_BODY_BYTES
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, VOCAB_SIZE, FakeWorker

PROMPT = {"prompt": [1, 2, 3]}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
FUNCTION = {"name": "f"}
TOOLS = MESSAGES | {"tools": [{"type": "function", "function": FUNCTION}]}
CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def after_hi(*messages: dict) -> dict:
    return {"messages": [*MESSAGES["messages"], *messages]}


def turn(**call: object) -> dict:
    """An assistant's call with something else about it."""
    return after_hi({"role": "assistant", "content": None, "tool_calls": [CALL, CALL | call]})


NESTED = "[" * 50_000

COMPLETIONS = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1, 2], []]}, "prompt[1]"),
    ({"prompt": ["a", [1], 2]}, "prompt[2]"),
    ({"prompt": ["a", [1, VOCAB_SIZE]]}, "prompt[1]"),
    ({"prompt": [[1], [2, 2.5]]}, "prompt[1][1]"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["a", "b"], "return_timing": True}, "return_timing"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1] * MAX_CONTEXT_TOKENS}, "prompt"),
    (PROMPT | {"max_tokens": MAX_CONTEXT_TOKENS}, "max_tokens"),
    (PROMPT | {"max_tokens": 0}, "max_tokens"),
    (PROMPT | {"max_tokens": 10**30}, "max_tokens"),
    (PROMPT | {"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    (PROMPT | {"max_tokens": None, "min_tokens": MAX_CONTEXT_TOKENS}, "min_tokens"),
    (PROMPT | {"min_tokens": -1}, "min_tokens"),
    (PROMPT | {"n": 0}, "n"),
    (PROMPT | {"n": 129}, "n"),
    (PROMPT | {"n": True}, "n"),
    (PROMPT | {"n": 1.5}, "n"),
    (PROMPT | {"best_of": 2}, "best_of"),
    (PROMPT | {"temperature": -0.1}, "temperature"),
    (PROMPT | {"temperature": 2.1}, "temperature"),
    (PROMPT | {"temperature": "hot"}, "temperature"),
    (PROMPT | {"top_p": 0}, "top_p"),
    (PROMPT | {"top_p": 1.1}, "top_p"),
    (PROMPT | {"top_k": -2}, "top_k"),
    (PROMPT | {"min_p": 1.5}, "min_p"),
    (PROMPT | {"repetition_penalty": 0}, "repetition_penalty"),
    (PROMPT | {"repetition_penalty": 1e39}, "repetition_penalty"),
    (PROMPT | {"presence_penalty": 3}, "presence_penalty"),
    (PROMPT | {"frequency_penalty": -3}, "frequency_penalty"),
    (PROMPT | {"seed": 2**70}, "seed"),
    (PROMPT | {"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    (PROMPT | {"logit_bias": {"1": 101}}, "logit_bias"),
    (PROMPT | {"logit_bias": {"a": 1}}, "logit_bias"),
    (PROMPT | {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    (PROMPT | {"stop": ["x"] * 17}, "stop"),
    (PROMPT | {"stop": [""]}, "stop"),
    (PROMPT | {"stop": "x" * 1001}, "stop"),
    (PROMPT | {"request_id": "x" * 513}, "request_id"),
    (PROMPT | {"stop": 3}, "stop"),
    (PROMPT | {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    (PROMPT | {"stop_token_ids": list(range(17))}, "stop_token_ids"),
    (PROMPT | {"logprobs": 21}, "logprobs"),
    (PROMPT | {"logprobs": -1}, "logprobs"),
    (PROMPT | {"echo": "yes"}, "echo"),
    (PROMPT | {"echo": True, "logprobs": 21}, "logprobs"),
    (PROMPT | {"prompt_logprobs": 21}, "prompt_logprobs"),
    (PROMPT | {"prompt_logprobs": -1}, "prompt_logprobs"),
    (PROMPT | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (PROMPT | {"suffix": "x"}, "suffix"),
    (PROMPT | {"stream_options": {"include_usage": True}}, "stream_options"),
    (PROMPT | {"tools": TOOLS["tools"]}, "tools"),
    (PROMPT | {"tool_choice": "required"}, "tool_choice"),
    (PROMPT | {"guided_json": {"type": "objekt"}}, "guided_json"),
    (PROMPT | {"grammar": "root ::= x"}, "grammar"),
    (PROMPT | {"n_predict": 5}, "n_predict"),
    (PROMPT | {"enable_thinking": True}, "enable_thinking"),
    (PROMPT | {"thinking": {"type": "enabled"}}, "thinking"),
    (PROMPT | {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    (PROMPT | {"priority": 2**31}, "priority"),
    (PROMPT | {"priority": -(2**31)}, "priority"),
    (PROMPT | {"priority": 0.5}, "priority"),
    (PROMPT | {"priority": "high"}, "priority"),
    (PROMPT | {"max_tokens": 2.5}, "max_tokens"),
    (PROMPT | {"stop_token_ids": [1, 2.5]}, "stop_token_ids[1]"),
    (PROMPT | {"logprobs": 0.5}, "logprobs"),
    ({"prompt": [[1, 2.5]]}, "prompt[1]"),
    ([], None),
]
CHATS = [
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages"),
    (MESSAGES | {"tools": [{"type": "function"}]}, "tools[0].function"),
    (TOOLS | {"tools": {}}, "tools"),
    (TOOLS | {"tools": ["f"]}, "tools[0]"),
    (TOOLS | {"tools": [{"function": FUNCTION}]}, "tools[0].type"),
    (TOOLS | {"tools": [{"type": "custom", "function": FUNCTION}]}, "tools[0].type"),
    (TOOLS | {"tools": [*TOOLS["tools"], {"type": "function", "function": {}}]}, "tools[1].function.name"),
    (TOOLS | {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    (TOOLS | {"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
    (
        TOOLS | {"tools": [{"type": "function", "function": FUNCTION | {"parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (
        TOOLS | {"tools": [{"type": "function", "function": FUNCTION | {"strict": 1}}]},
        "tools[0].function.strict",
    ),
    (TOOLS | {"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0].function"),
    (TOOLS | {"tool_choice": "any"}, "tool_choice"),
    (TOOLS | {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (TOOLS | {"tool_choice": {"type": "function"}}, "tool_choice"),
    (TOOLS | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (TOOLS | {"tool_choice": {"type": "function", "function": {"name": 1}}}, "tool_choice.function.name"),
    (TOOLS | {"tool_choice": {"type": "function", "function": FUNCTION}, "max_tokens": 3}, "max_tokens"),
    (MESSAGES | {"tool_choice": {"type": "function", "function": FUNCTION}}, "tool_choice"),
    (MESSAGES | {"tool_choice": "required"}, "tool_choice"),
    (TOOLS | {"parallel_tool_calls": 0}, "parallel_tool_calls"),
    (TOOLS | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    (TOOLS | {"functions": [FUNCTION]}, "functions"),
    (after_hi({"role": "tool", "content": "x"}), "messages[1].tool_call_id"),
    (after_hi({"role": "tool", "content": "x", "tool_call_id": ""}), "messages[1].tool_call_id"),
    (after_hi({"role": "tool", "content": "x", "tool_call_id": 1}), "messages[1].tool_call_id"),
    (after_hi({"role": "tool", "content": None, "tool_call_id": "functions.f:0"}), "messages[1].content"),
    (after_hi({"role": "user", "content": "x", "tool_call_id": "functions.f:0"}), "messages[1].tool_call_id"),
    (after_hi({"role": "user", "content": "x", "tool_calls": [CALL]}), "messages[1].tool_calls"),
    (after_hi({"role": "assistant", "content": None, "tool_calls": []}), "messages[1].content"),
    (after_hi({"role": "assistant", "content": None, "tool_calls": "f"}), "messages[1].tool_calls"),
    (turn(id=None), "messages[1].tool_calls[1].id"),
    (turn(type="custom"), "messages[1].tool_calls[1].type"),
    (turn(function={"name": "f"}), "messages[1].tool_calls[1].function.arguments"),
    (turn(function={"name": "f", "arguments": {}}), "messages[1].tool_calls[1].function.arguments"),
    (turn(function={"arguments": "{}"}), "messages[1].tool_calls[1].function.name"),
    (after_hi({"role": "user", "content": "x", "reasoning": "r"}), "messages[1].reasoning"),
    (after_hi({"role": "assistant", "content": "x", "reasoning_content": 1}), "messages[1].reasoning_content"),
    (after_hi({"role": "assistant", "content": "x", "audio": {"id": "a"}}), "messages[1].audio"),
    (after_hi({"role": "assistant", "content": "x", "refusal": "no"}), "messages[1].refusal"),
    (after_hi({"role": "user", "content": "x", "partial": True}), "messages[1].partial"),
    (after_hi({"role": "assistant", "content": None, "tool_calls": [CALL], "partial": True}), "messages[1].partial"),
    (
        {"messages": [{"role": "assistant", "content": "x", "partial": True}, *MESSAGES["messages"]]},
        "messages[0].partial",
    ),
    (MESSAGES | {"response_format": {"type": "json"}}, "response_format.type"),
    (MESSAGES | {"modalities": ["audio"]}, "modalities"),
    (
        MESSAGES | {"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 500}}},
        "response_format.json_schema.schema",
    ),
    (MESSAGES | {"store": 0}, "store"),
    (MESSAGES | {"chat_template": "x"}, "chat_template"),
    (MESSAGES | {"echo": True}, "echo"),
    (MESSAGES | {"prompt_logprobs": 21}, "prompt_logprobs"),
    (MESSAGES | {"top_logprobs": 2}, "top_logprobs"),
    (MESSAGES | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (MESSAGES | {"max_completion_tokens": MAX_CONTEXT_TOKENS}, "max_completion_tokens"),
    (MESSAGES | {"chat_template_kwargs": {"messages": []}}, "messages"),
]
GRPC: list[tuple[GenerateOptions, str]] = [
    ({"temperature": 3.0}, "sampling.temperature"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "sampling.logit_bias"),
    ({"max_tokens": MAX_CONTEXT_TOKENS}, "stop.max_tokens"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop.stop_token_ids"),
    ({"n": 0}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
]
NO_OPS = {
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "parallel_tool_calls": False,
    "store": True,
    "user": "me",
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "metadata": {"run": "7", "large": "x" * 10_000},
    "service_tier": "flex",
    "reasoning_effort": "high",
    "verbosity": "medium",
    "modalities": ["text"],
    "n": 2.0,
    "best_of": 2,
    "logit_bias": None,
    "stop": None,
    "functions": None,
    "logprobs": False,
    "top_logprobs": 0,
    "stream": False,
    "stream_options": {"include_usage": False},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "enable_thinking": False,
    "thinking": {"type": "disabled"},
    "n_predict": -1,
    "typical_p": 1.0,
    "grammar": "",
    "json_schema": {},
}


BROKEN = [
    *(b"", b"{", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"top_p": NaN}'),
    f'{{"tools": {NESTED}'.encode(),
]


def fault(response: httpx.Response, field: str | None) -> str | None:
    """What is wrong with the refusal, if anything."""
    error = response.json().get("error", {})
    if response.status_code != 400 or set(error) != {"message", "type", "param", "code"}:
        return f"{response.status_code} {response.text}"
    if error["type"] != "invalid_request_error" or error["param"] != field:
        return f"{error}, not {field}"
    return None


@pytest.mark.parametrize(("path", "cases"), [("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHATS)])
async def test_every_bad_parameter_is_refused_by_name_and_reaches_no_worker(
    http: httpx.AsyncClient, worker: FakeWorker, path: str, cases: list
):
    # one gateway for the whole table: the faults are collected, not stopped at
    faults = [(body, fault(await http.post(path, json=body), field)) for body, field in cases]
    assert [(body, found) for body, found in faults if found] == []
    assert worker.runs == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_json_is_refused(http: httpx.AsyncClient, worker: FakeWorker, path: str):
    answers = [await http.post(path, content=content) for content in BROKEN]
    assert [answer.status_code for answer in answers] == [400] * len(BROKEN)
    assert all(answer.json()["error"]["type"] == "invalid_request_error" for answer in answers)
    assert worker.runs == []


async def test_a_stream_that_is_refused_has_a_status_and_no_events(http: httpx.AsyncClient, worker: FakeWorker):
    assert fault(await http.post("/v1/completions", json={"prompt": [], "stream": True}), "prompt") is None
    assert worker.runs == []


async def test_what_is_too_long_for_the_context_says_so_by_openais_code(
    http: httpx.AsyncClient, grpc_client: AsyncClient
):
    for too_long in ({"prompt": [1] * MAX_CONTEXT_TOKENS}, PROMPT | {"max_tokens": MAX_CONTEXT_TOKENS - 2}):
        response = await http.post("/v1/completions", json=too_long)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    other = await http.post("/v1/completions", json={"prompt": []})
    assert other.json()["error"]["code"] == "invalid_value"
    with pytest.raises(ContextLengthExceeded):
        await grpc_client.generate([1] * MAX_CONTEXT_TOKENS)


async def test_a_parameter_that_asks_for_nothing_is_accepted(http: httpx.AsyncClient):
    response = await http.post("/v1/chat/completions", json=MESSAGES | NO_OPS | {"max_tokens": 2})
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 2
    assert "x-moonshard-unknown-fields" not in response.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_null_is_never_refused(http: httpx.AsyncClient, path: str):
    struct, asked = (CompletionBody, PROMPT) if path == "/v1/completions" else (ChatBody, MESSAGES)
    nulls = dict.fromkeys(struct.__struct_fields__) | asked | {"max_tokens": 1}
    response = await http.post(path, json=nulls)
    assert response.status_code == 200, response.text
    assert "x-moonshard-unknown-fields" not in response.headers


async def test_a_context_overflow_is_told_in_the_words_that_clients_look_for(
    http: httpx.AsyncClient, grpc_client: AsyncClient
):
    # LiteLLM's, and LangChain's of an event in a stream and of an answer, the text of which is all that they look at
    words = (
        f"This model's maximum context length is {MAX_CONTEXT_TOKENS} tokens",
        "exceeds the context window",
        "context_length_exceeded",
    )
    for too_long in ({"prompt": [1] * MAX_CONTEXT_TOKENS}, PROMPT | {"max_tokens": MAX_CONTEXT_TOKENS - 2}):
        message = (await http.post("/v1/completions", json=too_long)).json()["error"]["message"]
        assert all(word in message for word in words), message
    with pytest.raises(ContextLengthExceeded, match=words[0]):
        await grpc_client.generate([1] * MAX_CONTEXT_TOKENS)


async def test_another_model_is_not_found(http: httpx.AsyncClient, grpc_client: AsyncClient):
    response = await http.post("/v1/completions", json=PROMPT | {"model": "gpt"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
    assert (await http.get("/v1/models/gpt")).status_code == 404
    with pytest.raises(NotFound):
        await grpc_client.generate([1], model="gpt")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
async def test_an_unknown_route_has_openais_error_shape(http: httpx.AsyncClient, method, path, status):
    response = await http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_over_the_limit_is_refused_while_it_is_read(http: httpx.AsyncClient):
    async def endless():
        for _ in range(100):
            yield b"x" * 65_536

    declared = await http.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1))
    undeclared = await http.post("/v1/completions", content=endless())
    for response in (declared, undeclared):
        assert response.status_code == 413
        assert "error" in response.json()


async def test_detokenize_refuses_ids_that_are_no_tokens(http: httpx.AsyncClient):
    response = await http.post("/detokenize", json={"tokens": [10**9]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")


async def test_grpc_names_the_field_as_its_message_spells_it(grpc_client: AsyncClient, worker: FakeWorker):
    for options, field in GRPC:
        with pytest.raises(InvalidArgument) as caught:
            await grpc_client.generate([1, 2], **options)
        assert caught.value.field == field
    assert worker.runs == []


@pytest.fixture
def model_path(request: pytest.FixtureRequest, tmp_path):
    """For the tests that ask for it: a folder with nothing but a config."""
    if "bare_folder" not in request.fixturenames:
        return request.getfixturevalue("kimi_folder")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return tmp_path


@pytest.fixture
def bare_folder() -> None:
    pass


@pytest.mark.usefixtures("bare_folder")
async def test_without_a_tokenizer_the_start_says_so(running: RunningGateway, caplog: pytest.LogCaptureFixture):
    assert [record for record in caplog.get_records("setup") if "has no tokenizer" in record.message]


@pytest.mark.usefixtures("bare_folder")
async def test_without_a_tokenizer_texts_are_refused_and_tokens_served(http: httpx.AsyncClient, worker: FakeWorker):
    assert fault(await http.post("/v1/completions", json={"prompt": "hi"}), "prompt") is None
    assert fault(await http.post("/v1/completions", json=PROMPT | {"stop": "x"}), "stop") is None
    assert fault(await http.post("/v1/chat/completions", json=MESSAGES), "messages") is None
    assert fault(await http.post("/tokenize", json={"prompt": "hi"}), "prompt") is None
    assert fault(await http.post("/detokenize", json={"tokens": [1]}), "tokens") is None
    assert worker.runs == []
    served = await http.post("/v1/completions", json=PROMPT | {"return_token_ids": True, "logprobs": 1})
    assert len(served.json()["choices"][0]["token_ids"]) == 16
    assert served.json()["choices"][0]["text"] == ""
