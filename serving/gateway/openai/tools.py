"""The tools that a chat may call: `tools`, `tool_choice` and `parallel_tool_calls`.

A tool goes to the chat template as the client wrote it, so all of its keys are told to the model, unless the template
wants a declaration made of it (`chat.declarations`); checked is only what an answer's calls are checked against. A
named function is called by beginning the answer with that call; one call is had by ending the answer after it. What
else is asked of calls is the answer's grammar (`serving.constrained`): that there are some (`required`), that their
arguments are objects, and those of a function with `strict: true` what its schema says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.constrained.parts import Part, json_part
from moonshard.serving.gateway.forms import part_errors
from moonshard.serving.gateway.openai.body import ABSENT, decode, shape_error
from moonshard.serving.gateway.openai.messages import Message
from moonshard.serving.gateway.quoted import quoted
from moonshard.serving.gateway.request import ToolUse

type Tool = dict[str, object]


class _Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, kw_only=True):
    type: str
    function: _Function


class _Tools(msgspec.Struct):
    tools: list[_Tool]


class _Named(msgspec.Struct, kw_only=True):
    name: str


class _NamedFunction(msgspec.Struct, kw_only=True):
    """OpenAI's way to say that this function is to be called."""

    type: str
    function: _Named | None = None


class _Choice(msgspec.Struct):
    tool_choice: str | _NamedFunction | None


_CHOICE = msgspec.json.Decoder(_Choice)
_ADVICE = "only 'auto', 'none', 'required' and a function of the tools, by its name, are supported"
_NOTHING: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Which functions the model is told that it may call; none where it is not to call any."""

    tools: Sequence[Tool] = ()
    functions: frozenset[str] = frozenset()
    forced: str | None = None
    is_single: bool = False
    is_required: bool = False
    arguments: Mapping[str, Part] = field(default_factory=dict)

    def use(self, messages: Sequence[Message]) -> ToolUse | None:
        """As `ToolUse.of`, after these messages."""
        made = (call.id for message in messages for call in message.tool_calls or ())
        return ToolUse.of(
            self.functions,
            made,
            forced=self.forced,
            is_single=self.is_single,
            is_required=self.is_required,
            arguments=self.arguments,
        )


def offer(tools: Sequence[Tool] | None, choice: msgspec.Raw = ABSENT, is_parallel: bool | None = None) -> Offer:
    """InvalidArgument for what is not well formed and for what is not served."""
    chosen = _chosen(choice)
    checked = _checked(tools or ())
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(checked)]
    forced = chosen.name if isinstance(chosen, _Named) else None
    if forced is not None and forced not in functions:
        raise InvalidArgument(f"tool_choice: there is no function {quoted(forced)} in tools", field="tool_choice")
    if chosen == "required" and not tools:
        raise InvalidArgument("tool_choice: 'required' needs tools", field="tool_choice")
    if not tools or chosen == "none":
        return Offer()
    return Offer(
        tools=[_uncached(tool) for tool in tools],
        functions=frozenset(functions),
        forced=forced,
        is_single=is_parallel is False,
        is_required=chosen == "required",
        arguments={
            tool.function.name: strict_arguments(tool.function.parameters, f"tools[{index}].function.parameters")
            for index, tool in enumerate(checked)
            if tool.function.strict
        },
    )


def strict_arguments(parameters: Mapping[str, object] | None, where: str) -> Part:
    """What a call's arguments keep to; of a function without parameters there are none.

    InvalidArgument where they could be no object.
    """
    schema = _NOTHING if parameters is None else parameters
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidArgument(f"{where}.type: arguments are an object", field=f"{where}.type")
    with part_errors():
        return json_part({**schema, "type": "object"}, where)


def _chosen(choice: msgspec.Raw) -> str | _Named | None:
    raw = bytes(choice)
    said = decode(_CHOICE, b'{"tool_choice":' + raw + b"}").tool_choice if raw else None
    match said:
        case None | "auto" | "none" | "required":
            return said
        case _NamedFunction(type="function", function=_Named() as function):
            return function
        case _:
            raise InvalidArgument(f"tool_choice: {_ADVICE}", field="tool_choice")


def _checked(tools: Sequence[Tool]) -> Sequence[_Tool]:
    try:
        return msgspec.convert({"tools": tools}, _Tools).tools
    except msgspec.ValidationError as error:
        raise shape_error(error) from error


def _function(tool: _Tool, where: str) -> str:
    """Its name."""
    if tool.type != "function":
        name = f"{where}.type"
        raise InvalidArgument(f"{name}: only functions are supported, not {quoted(tool.type)}", field=name)
    if not tool.function.name:
        raise InvalidArgument(f"{where}.function.name is empty", field=f"{where}.function.name")
    return tool.function.name


def _uncached(tool: Tool) -> Tool:
    """The tool without the keys that are meant for a cache and not for the model."""
    return {key: value for key, value in tool.items() if key != "cache_control"}
