"""LiteLLM, with the server as an OpenAI-compatible one."""

import json
import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(asked: dict, messages: list, **options: object):
    model = f"openai/{asked['model']}"
    return litellm.completion(
        model=model, messages=messages, api_base=asked["base_url"], api_key="none", num_retries=0, **options
    )


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def streamed(asked: dict) -> dict:
    chunks = list(ask(asked, user(asked["question"]), stream=True, stream_options={"include_usage": True}))
    usage = litellm.stream_chunk_builder(chunks).usage
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    return {"pieces": pieces, "stream_usage": [usage.prompt_tokens, usage.completion_tokens]}


def with_tool(asked: dict) -> dict:
    messages = user(asked["tool_question"])
    first = ask(asked, messages, tools=[TOOL]).choices[0].message
    (call,) = first.tool_calls
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": asked["weather"]}]
    last = ask(asked, messages, tools=[TOOL]).choices[0].message
    return {"calls": [json.loads(call.function.arguments)], "answer": last.content}


def overflow(asked: dict) -> dict:
    try:
        ask(asked, user(asked["too_long"]))
    except litellm.ContextWindowExceededError as error:
        return {"overflow": type(error).__name__}
    return {}


def main() -> None:
    asked = json.loads(sys.argv[1])
    whole = ask(asked, user(asked["question"]))
    said = {
        "chat": whole.choices[0].message.content,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    }
    print(json.dumps({**said, **streamed(asked), **with_tool(asked), **overflow(asked)}))


main()
