"""Anthropic's own package, over the Messages API."""

import json
import sys

import anthropic

MAX_TOKENS = 256
TOOL = {
    "name": "get_weather",
    "description": "Weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def usage(message: anthropic.types.Message) -> list[int]:
    counted = message.usage
    return [counted.input_tokens + (counted.cache_read_input_tokens or 0), counted.output_tokens]


def text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def streamed(client: anthropic.Anthropic, asked: dict) -> dict:
    messages = [{"role": "user", "content": asked["question"]}]
    with client.messages.stream(model=asked["model"], max_tokens=MAX_TOKENS, messages=messages) as stream:
        pieces = list(stream.text_stream)
        return {"pieces": pieces, "stream_usage": usage(stream.get_final_message())}


def with_tool(client: anthropic.Anthropic, asked: dict) -> dict:
    ask = {"model": asked["model"], "max_tokens": MAX_TOKENS, "tools": [TOOL]}
    messages = [{"role": "user", "content": asked["tool_question"]}]
    with client.messages.stream(**ask, messages=messages) as stream:
        first = stream.get_final_message()
    (call,) = (block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": asked["weather"]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return {"calls": [call.input], "answer": text(client.messages.create(**ask, messages=messages))}


def overflow(client: anthropic.Anthropic, asked: dict) -> dict:
    messages = [{"role": "user", "content": asked["too_long"]}]
    try:
        client.messages.create(model=asked["model"], max_tokens=MAX_TOKENS, messages=messages)
    except anthropic.BadRequestError as error:
        message = error.body["error"]["message"]  # there is no code
        return {"overflow": "context_length_exceeded" if message.startswith("prompt is too long") else message}
    return {}


def main() -> None:
    asked = json.loads(sys.argv[1])
    base_url = asked["base_url"].removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": asked["question"]}]
    whole = client.messages.create(model=asked["model"], max_tokens=MAX_TOKENS, messages=messages)
    counted = client.messages.count_tokens(model=asked["model"], messages=messages).input_tokens
    if counted != usage(whole)[0]:
        raise SystemExit(f"{counted} tokens were counted, and {usage(whole)} used")
    said = {"chat": text(whole), "usage": usage(whole)}
    print(json.dumps({**said, **streamed(client, asked), **with_tool(client, asked), **overflow(client, asked)}))


main()
