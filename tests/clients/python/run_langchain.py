"""LangChain's `ChatOpenAI`."""

import json
import sys
from functools import reduce
from operator import add

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def counted(usage: dict) -> list[int]:
    return [usage["input_tokens"], usage["output_tokens"]]


def with_tool(chat: ChatOpenAI, asked: dict) -> dict:
    @tool
    def get_weather(city: str) -> str:
        """Weather in a city"""
        return asked["weather"]

    model = chat.bind_tools([get_weather])
    messages = [HumanMessage(asked["tool_question"])]
    first = reduce(add, model.stream(messages))
    (call,) = first.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    return {"calls": [call["args"]], "answer": model.invoke([*messages, first, result]).content}


def overflow(chat: ChatOpenAI, asked: dict) -> dict:
    try:
        chat.invoke(asked["too_long"])
    except ContextOverflowError as error:
        return {"overflow": error.code}
    return {}


def main() -> None:
    asked = json.loads(sys.argv[1])
    chat = ChatOpenAI(
        base_url=asked["base_url"], api_key="none", model=asked["model"], stream_usage=True, max_retries=0
    )
    whole = chat.invoke(asked["question"])
    chunks = list(chat.stream(asked["question"]))
    said = {
        "chat": whole.content,
        "usage": counted(whole.usage_metadata),
        "pieces": [chunk.content for chunk in chunks],
        "stream_usage": next(counted(chunk.usage_metadata) for chunk in chunks if chunk.usage_metadata),
    }
    print(json.dumps({**said, **with_tool(chat, asked), **overflow(chat, asked)}))


main()
