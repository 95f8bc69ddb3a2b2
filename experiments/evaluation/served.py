"""A running server answers, over OpenAI's HTTP API: chat completions, tools and their results as any client sends them.

Whatever goes wrong with one request is that turn's `NoReply`: counted, not dropped. Only a server that does not answer
at all, before anything was asked, is an error.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from moonshard.experiments.common.turns import WrittenCall
from moonshard.experiments.evaluation.replies import Asked, Identity, NoReply, Reply
from moonshard.experiments.training.texts.tools.tasks import MAX_ANSWER_TOKENS
from moonshard.serving.commands.terminal_chat import authorization, first_model, root_of

TIMEOUT = httpx.Timeout(600.0, connect=5.0)  # a reply comes whole, at the end
NUM_IN_FLIGHT = 8


class ServedAnswers:
    """Answers of a running server. A context manager, since it keeps connections open. ConfigError if none answers."""

    def __init__(self, url: str, api_key: str | None = None):
        root, headers = root_of(url), authorization(api_key)
        with httpx.Client(base_url=root, headers=headers, timeout=TIMEOUT, trust_env=False) as http:
            self.identity = Identity(model=first_model(http), url=url)
        self._runner = asyncio.Runner()
        self._http = httpx.AsyncClient(base_url=root, headers=headers, timeout=TIMEOUT, trust_env=False)
        self._places = asyncio.Semaphore(NUM_IN_FLIGHT)

    def __enter__(self) -> "ServedAnswers":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._http.aclose())
        self._runner.close()

    def router_load(self) -> None:
        """None: servers do not tell."""

    def answer(self, asked: Sequence[Asked]) -> list[Reply | NoReply]:
        return self._runner.run(self._all(asked))

    async def _all(self, asked: Sequence[Asked]) -> list[Reply | NoReply]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(each)) for each in asked]
        return [task.result() for task in tasks]

    async def _one(self, asked: Asked) -> Reply | NoReply:
        async with self._places:
            try:
                response = await self._http.post("/v1/chat/completions", json=body_of(self.identity.model, asked))
                return reply_of(response.status_code, response.json())
            except httpx.HTTPError as error:
                return NoReply(error=f"{type(error).__name__}: {error}")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                return NoReply(error=f"not a chat completion: {type(error).__name__}: {error}")


def body_of(model: str, asked: Asked) -> dict[str, Any]:
    body = {"model": model, "messages": asked.messages, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
    return body | {"tools": asked.tools} if asked.tools else body


def reply_of(status: int, body: Mapping[str, Any]) -> Reply | NoReply:
    """Reads a chat completion. LookupError, TypeError or AttributeError for what is none."""
    if status != httpx.codes.OK:
        return NoReply(error=f"HTTP {status}: {body['error']['message']}")
    message = body["choices"][0]["message"]
    calls = tuple(
        WrittenCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    content = message["content"] or ""
    if not isinstance(content, str):
        raise TypeError(f"content is {content!r}")
    return Reply(content=content, calls=calls)
