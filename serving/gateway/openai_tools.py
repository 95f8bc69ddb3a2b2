"""The tools that a chat may call: `tools`, `tool_choice` and `parallel_tool_calls`.

A tool goes to the chat template as the client wrote it, so all of its keys are told to the model; checked is only what
an answer's calls are checked against, and what would promise more than is served. To force a call, to forbid a second
one or to hold arguments to their schema takes constrained decoding, which there is not: these are refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.openai_body import shape_error
from moonshard.serving.gateway.openai_messages import Message
from moonshard.serving.gateway.parameters import ToolUse

type Tool = dict[str, object]


class _Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: _Function


class _Tools(msgspec.Struct):
    tools: list[_Tool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What the model is told it may call: nothing, where it is not to call anything."""

    tools: Sequence[Tool] = ()
    functions: frozenset[str] = frozenset()

    def use(self, messages: Sequence[Message]) -> ToolUse | None:
        """None without tools: nothing is looked for in the answer then."""
        if not self.tools:
            return None
        made = (call for message in messages for call in message.tool_calls or ())
        return ToolUse(functions=self.functions, call_ids=frozenset(call.id for call in made))


def offer(tools: Sequence[Tool] | None, choice: object = None, is_parallel: bool | None = None) -> Offer:
    """InvalidArgument for what is not well formed and for what is not served."""
    if choice not in (None, "auto", "none"):
        message = "tool_choice: only 'auto' and 'none' are supported: no call can be forced"
        raise InvalidArgument(message, field="tool_choice")
    if not tools:
        return Offer()
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(_checked(tools))]
    if choice == "none":
        return Offer()
    if is_parallel is False:
        message = "parallel_tool_calls: false is not supported: a second call cannot be forbidden"
        raise InvalidArgument(message, field="parallel_tool_calls")
    return Offer(tools=tools, functions=frozenset(functions))


def _checked(tools: Sequence[Tool]) -> Sequence[_Tool]:
    try:
        return msgspec.convert({"tools": tools}, _Tools).tools
    except msgspec.ValidationError as error:
        raise shape_error(error) from error


def _function(tool: _Tool, where: str) -> str:
    """Its name."""
    if not tool.function.name:
        raise InvalidArgument(f"{where}.function.name is empty", field=f"{where}.function.name")
    if tool.function.strict:
        name = f"{where}.function.strict"
        raise InvalidArgument(f"{name}: true is not supported: no schema is enforced", field=name)
    return tool.function.name
