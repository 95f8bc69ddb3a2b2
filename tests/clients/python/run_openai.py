"""OpenAI's own package."""

import json
import sys

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def streamed(client: openai.OpenAI, asked: dict) -> dict:
    messages = [{"role": "user", "content": asked["question"]}]
    with client.chat.completions.stream(
        model=asked["model"], messages=messages, stream_options={"include_usage": True}
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        usage = stream.get_final_completion().usage
    return {"pieces": pieces, "stream_usage": [usage.prompt_tokens, usage.completion_tokens]}


def with_tool(client: openai.OpenAI, asked: dict) -> dict:
    messages = [{"role": "user", "content": asked["tool_question"]}]
    first = client.chat.completions.create(model=asked["model"], messages=messages, tools=[TOOL]).choices[0]
    (call,) = first.message.tool_calls
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": asked["weather"]}]
    last = client.chat.completions.create(model=asked["model"], messages=messages, tools=[TOOL]).choices[0]
    return {"calls": [json.loads(call.function.arguments)], "answer": last.message.content}


def overflow(client: openai.OpenAI, asked: dict) -> dict:
    messages = [{"role": "user", "content": asked["too_long"]}]
    try:
        client.chat.completions.create(model=asked["model"], messages=messages)
    except openai.BadRequestError as error:
        return {"overflow": error.code}
    return {}


def main() -> None:
    asked = json.loads(sys.argv[1])
    client = openai.OpenAI(base_url=asked["base_url"], api_key="none", max_retries=0)
    messages = [{"role": "user", "content": asked["question"]}]
    whole = client.chat.completions.create(model=asked["model"], messages=messages)
    said = {
        "chat": whole.choices[0].message.content,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    }
    print(json.dumps({**said, **streamed(client, asked), **with_tool(client, asked), **overflow(client, asked)}))


main()
