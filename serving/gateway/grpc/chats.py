"""Chats of the public gRPC API: messages and tools become what HTTP's are, so that one place checks both.

The tool calls of an answer become this API's messages here too.
"""

from collections.abc import Sequence

import msgspec

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import InvalidArgument
from moonshard.serving.constrained.parts import Part
from moonshard.serving.gateway.forms import read_form
from moonshard.serving.gateway.intake.bounds import OTHER_BYTES
from moonshard.serving.gateway.openai.messages import CalledFunction, CallMade, Message, chat_messages, goes_on
from moonshard.serving.gateway.openai.tools import strict_arguments
from moonshard.serving.gateway.pipeline.choice import CallsMade
from moonshard.serving.gateway.quoted import quoted
from moonshard.serving.gateway.request import ChatPrompt, Thinking, ToolUse

_OBJECT = msgspec.json.Decoder(dict[str, object])


def chat_prompt(chat: pb.ChatPrompt) -> ChatPrompt:
    """InvalidArgument as over HTTP, naming the field as the API spells it."""
    messages, tools = [_message(message) for message in chat.messages], _tools(chat.tools)
    is_continued = goes_on(messages, "chat.messages")
    kwargs = _object(chat.template_kwargs, "chat.template_kwargs")
    if tools and "tools" in kwargs:
        name = "chat.template_kwargs"
        raise InvalidArgument(f"{name}: there are tools in the request already", field=name)
    return ChatPrompt(
        chat_messages(messages, "chat.messages"),
        kwargs | ({"tools": tools} if tools else {}),
        is_continued=is_continued,
        thinking=Thinking.by_effort(chat.reasoning_effort or None),
    )


def tool_use(
    chat: pb.ChatPrompt, forced: str = "", *, is_single: bool = False, is_required: bool = False
) -> ToolUse | None:
    """None without tools. InvalidArgument for a function to be called that is none of them, and for a bad schema."""
    if is_required and not chat.tools:
        raise InvalidArgument("require_tool_call: needs chat.tools", field="require_tool_call")
    functions = frozenset(tool.name for tool in chat.tools)
    if forced and forced not in functions:
        raise InvalidArgument(f"forced_function: there is no tool {quoted(forced)}", field="forced_function")
    made = (call.id for message in chat.messages for call in message.tool_calls)
    arguments = {
        tool.name: _strict_arguments(tool, f"chat.tools[{i}].parameters")
        for i, tool in enumerate(chat.tools)
        if tool.strict
    }
    return ToolUse.of(
        functions,
        made,
        forced=forced or None,
        is_single=is_single,
        is_required=is_required,
        arguments=arguments,
    )


def structured_outputs(asked: pb.StructuredOutputs) -> Part | None:
    """None where nothing is asked. InvalidArgument for what can be no grammar."""
    name = asked.WhichOneof("constraint")
    if name is None or (name == "json_object" and not asked.json_object):
        return None
    value = list(asked.choice.texts) if name == "choice" else getattr(asked, name)
    return read_form([("json" if name == "json_schema" else name, f"structured_outputs.{name}", value)])


def calls_delta(made: CallsMade) -> pb.Delta:
    parts = [
        pb.ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments) for part in made.calls
    ]
    return pb.Delta(choice=made.choice, tool_calls=parts)


def _message(message: pb.ChatMessage) -> Message:
    calls = [
        CallMade(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]
    return Message(
        role=message.role,
        content=None if calls and not message.content else message.content,
        name=message.name or None,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id or None,
        reasoning_content=message.reasoning or None,
        partial=message.partial,
    )


def _tools(tools: Sequence[pb.Tool]) -> list[dict[str, object]]:
    """Schemas are decoded here and now: together they may be as long as all of a body besides its text."""
    if sum(len(tool.parameters) for tool in tools) > OTHER_BYTES:
        raise InvalidArgument(f"chat.tools: the parameters have more than {OTHER_BYTES} characters", field="chat.tools")
    return [{"type": "function", "function": _function(tool, f"chat.tools[{i}]")} for i, tool in enumerate(tools)]


def _function(tool: pb.Tool, where: str) -> dict[str, object]:
    if not tool.name:
        raise InvalidArgument(f"{where}.name is empty", field=f"{where}.name")
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = _object(tool.parameters, f"{where}.parameters")
    if tool.strict:
        function["strict"] = True
    return function


def _strict_arguments(tool: pb.Tool, where: str) -> Part:
    return strict_arguments(_object(tool.parameters, where) if tool.parameters else None, where)


def _object(text: str, name: str) -> dict[str, object]:
    """A field that is spelt as JSON; an empty one where it is not set."""
    if len(text) > OTHER_BYTES:
        raise InvalidArgument(f"{name}: has more than {OTHER_BYTES} characters", field=name)
    try:
        return _OBJECT.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgument(f"{name}: expected a JSON object: {error}", field=name) from error
