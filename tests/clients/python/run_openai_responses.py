"""OpenAI's own package, over the Responses API."""

import json
import sys

import openai

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


def usage(response: openai.types.responses.Response) -> list[int]:
    return [response.usage.input_tokens, response.usage.output_tokens]


def streamed(client: openai.OpenAI, asked: dict) -> dict:
    with client.responses.stream(model=asked["model"], input=asked["question"]) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        return {"pieces": pieces, "stream_usage": usage(stream.get_final_response())}


def with_tool(client: openai.OpenAI, asked: dict) -> dict:
    ask = {"model": asked["model"], "tools": [TOOL]}
    with client.responses.stream(**ask, input=asked["tool_question"]) as stream:
        first = stream.get_final_response()
    (call,) = (item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": asked["weather"]}
    last = client.responses.create(**ask, input=[result], previous_response_id=first.id)
    question = {"role": "user", "content": asked["tool_question"]}
    again = client.responses.create(**ask, input=[question, *first.output, result])
    if again.output_text != last.output_text:
        raise SystemExit(f"by its id {last.output_text!r}, sent back {again.output_text!r}")
    return {"calls": [json.loads(call.arguments)], "answer": last.output_text}


def overflow(client: openai.OpenAI, asked: dict) -> dict:
    try:
        client.responses.create(model=asked["model"], input=asked["too_long"])
    except openai.BadRequestError as error:
        return {"overflow": error.code}
    return {}


def main() -> None:
    asked = json.loads(sys.argv[1])
    client = openai.OpenAI(base_url=asked["base_url"], api_key="none", max_retries=0)
    whole = client.responses.create(model=asked["model"], input=asked["question"])
    said = {"chat": whole.output_text, "usage": usage(whole)}
    print(json.dumps({**said, **streamed(client, asked), **with_tool(client, asked), **overflow(client, asked)}))


main()
