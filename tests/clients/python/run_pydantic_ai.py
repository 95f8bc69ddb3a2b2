"""pydantic-ai: an agent that runs its tool itself."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def streamed(agent: Agent, asked: dict) -> dict:
    async with agent.run_stream(asked["question"]) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        return {"pieces": pieces, "stream_usage": [run.usage.input_tokens, run.usage.output_tokens]}


async def with_tool(model: OpenAIChatModel, asked: dict) -> dict:
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Weather in a city"""
        return asked["weather"]

    run = await agent.run(asked["tool_question"])
    responses = [message for message in run.all_messages() if isinstance(message, ModelResponse)]
    calls = [call.args_as_dict() for response in responses for call in response.tool_calls]
    return {"calls": calls, "answer": run.output}


async def overflow(agent: Agent, asked: dict) -> dict:
    try:
        await agent.run(asked["too_long"])
    except ModelHTTPError as error:
        return {"overflow": error.body["code"]}
    return {}


async def main() -> None:
    asked = json.loads(sys.argv[1])
    model = OpenAIChatModel(asked["model"], provider=OpenAIProvider(base_url=asked["base_url"], api_key="none"))
    agent = Agent(model)
    whole = await agent.run(asked["question"])
    said = {
        "chat": whole.output,
        "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
        **await streamed(agent, asked),
        **await with_tool(model, asked),
        **await overflow(agent, asked),
    }
    print(json.dumps(said))


asyncio.run(main())
