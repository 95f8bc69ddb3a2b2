"""A chat over OpenAI's HTTP API: a stream is shown as it comes, tools are run here and their results sent back.

Asynchronous where the terminal chat is not, so that Ctrl-C ends a running request at once and with it the server.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

import httpx
import msgspec

from moonshard.experiments.common.turns import WrittenCall, assistant_message, result_message
from moonshard.experiments.demo.tables import Account
from moonshard.experiments.demo.toolbox import declarations, run_tool
from moonshard.experiments.training.texts.conversation import Call, Message
from moonshard.rpc.types import Timing
from moonshard.serving.commands.terminal_chat import ServerError, chunk_of, error_text

CHAT_PATH = "/v1/chat/completions"
MAX_ROUNDS = 3  # of calls for one question: a model may call for ever
Show = Callable[[str], None]  # takes text as it arrives


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReply:
    """One streamed response: words, or calls, or first words and then calls."""

    text: str
    calls: tuple[WrittenCall, ...]
    account: Account


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoTurn:
    """All that came of one question."""

    calls: tuple[WrittenCall, ...]  # of every round
    answer: str
    accounts: tuple[Account, ...]  # of every request


class Session:
    """A conversation that resends what was said, as OpenAI's API has it. With tools, they are declared each time."""

    def __init__(self, http: httpx.AsyncClient, body: Mapping[str, object], show: Show, *, has_tools: bool) -> None:
        self._http = http
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_timing": True}
        if has_tools:
            self._body["tools"] = declarations()
        self._show = show
        self._messages: list[Message] = []

    async def ask(self, question: str, title: str) -> DemoTurn:
        """Asks until the model answers in words, with up to `MAX_ROUNDS` rounds of tools. ServerError if refused.

        A model that goes on calling is asked no more: the answer is what it said beside its last calls, perhaps "".
        `title` is the account's; those of further requests, after calls, are "answer".
        """
        self._messages.append({"role": "user", "content": question})
        replies = [await self._request(title)]
        while replies[-1].calls and len(replies) <= MAX_ROUNDS:
            self._messages += [_result(call, self._show) for call in replies[-1].calls]
            replies.append(await self._request("answer"))
        return DemoTurn(
            calls=tuple(call for reply in replies for call in reply.calls),
            answer=replies[-1].text,
            accounts=tuple(reply.account for reply in replies),
        )

    async def _request(self, title: str) -> DemoReply:
        reply = await _read(_stream(self._http, {**self._body, "messages": self._messages}), title, self._show)
        self._messages.append(assistant_message(reply.text, reply.calls))
        self._show("\n")
        return reply


def parsed(call: WrittenCall) -> Call:
    """The call's arguments. The gateway has checked that they are an object."""
    return Call(name=call.name, arguments=msgspec.json.decode(call.arguments))


def _result(call: WrittenCall, show: Show) -> Message:
    """Runs the tool and returns its result as the message to send back."""
    result = run_tool(parsed(call))
    show(f"{call.name} returns {result}\n")
    return result_message(call, result)


async def _stream(http: httpx.AsyncClient, body: Mapping[str, object]) -> AsyncGenerator[dict]:
    """The chunks of one response. ServerError for whatever the server refuses, also in the middle."""
    try:
        async with http.stream("POST", CHAT_PATH, json=body) as response:
            if response.is_error:
                raise ServerError(error_text(await response.aread(), response.status_code))
            async for line in response.aiter_lines():
                if (chunk := chunk_of(line)) is not None:
                    yield chunk
    except httpx.TransportError as error:
        raise ServerError(f"the connection to the server broke: {error}") from error


async def _read(stream: AsyncGenerator[dict], title: str, show: Show) -> DemoReply:
    text, calls, last = "", list[WrittenCall](), {}
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            for choice in chunk["choices"]:
                said = choice["delta"].get("content") or ""
                show(said)
                text += said
                for part in choice["delta"].get("tool_calls") or ():
                    if "name" in part["function"] and (text or calls):
                        show("\n")
                    _add(calls, part, show)
            last = chunk
    return DemoReply(text=text, calls=tuple(calls), account=_account(title, last))


def _add(calls: list[WrittenCall], part: Mapping, show: Show) -> None:
    """A part that has a name begins a call, the others go on with the arguments of the one at their index."""
    said = part["function"]
    if "name" in said:
        calls.append(WrittenCall(id=part["id"], name=said["name"], arguments=""))
        show(f"calls {said['name']} ")
    call = calls[part["index"]]
    calls[part["index"]] = replace(call, arguments=call.arguments + said.get("arguments", ""))
    show(said.get("arguments", ""))


def _account(title: str, last: Mapping) -> Account:
    """Reads usage and times from a stream's last chunk. ServerError where it has none."""
    if "timing" not in last or "usage" not in last:
        raise ServerError("the stream ended without its summary")
    return Account(
        title=title,
        num_prompt_tokens=last["usage"]["prompt_tokens"],
        num_completion_tokens=last["usage"]["completion_tokens"],
        timing=Timing(**last["timing"]),
    )


async def count_tokens(http: httpx.AsyncClient, text: str) -> int:
    """The number of tokens by the served model's tokenizer."""
    try:
        response = await http.post("/tokenize", json={"prompt": text})
    except httpx.TransportError as error:
        raise ServerError(f"the connection to the server broke: {error}") from error
    if response.is_error:
        raise ServerError(error_text(response.content, response.status_code))
    return response.json()["count"]
