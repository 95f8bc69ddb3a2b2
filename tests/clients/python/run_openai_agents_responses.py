"""OpenAI's agents SDK over the Responses API, as it is by default: an agent that runs its tool itself."""

import asyncio
import json
import sys

import openai
from agents import (
    Agent,
    Runner,
    ToolCallItem,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from agents.result import RunResultBase


def usage(run: RunResultBase) -> list[int]:
    counted = run.context_wrapper.usage
    return [counted.input_tokens, counted.output_tokens]


async def streamed(agent: Agent, asked: dict) -> dict:
    run = Runner.run_streamed(agent, asked["question"])
    raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
    pieces = [event.delta for event in raw if event.type == "response.output_text.delta"]
    return {"pieces": pieces, "stream_usage": usage(run)}


async def with_tool(asked: dict) -> dict:
    @function_tool
    def get_weather(city: str) -> str:
        """Weather in a city"""
        return asked["weather"]

    agent = Agent(name="agent", model=asked["model"], tools=[get_weather])
    run = Runner.run_streamed(agent, asked["tool_question"])
    async for _ in run.stream_events():  # it runs while somebody reads
        pass
    calls = [json.loads(item.raw_item.arguments) for item in run.new_items if isinstance(item, ToolCallItem)]
    return {"calls": calls, "answer": run.final_output}


async def overflow(agent: Agent, asked: dict) -> dict:
    try:
        await Runner.run(agent, asked["too_long"])
    except openai.BadRequestError as error:
        return {"overflow": error.code}
    return {}


async def main() -> None:
    asked = json.loads(sys.argv[1])
    set_default_openai_client(openai.AsyncOpenAI(base_url=asked["base_url"], api_key="none", max_retries=0))
    set_tracing_disabled(True)
    agent = Agent(name="agent", model=asked["model"])
    whole = await Runner.run(agent, asked["question"])
    said = {
        "chat": whole.final_output,
        "usage": usage(whole),
        **await streamed(agent, asked),
        **await with_tool(asked),
        **await overflow(agent, asked),
    }
    print(json.dumps(said))


asyncio.run(main())
