"""What a request for a message means: the chat of its system's prompt and its turns."""

from collections.abc import Mapping, Sequence

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.chats import meant_by, raw, sampling_of
from moonshard.serving.gateway.messages.body import (
    ContextManagement,
    CountBody,
    MessagesBody,
    OutputFormat,
    SchemaTool,
    ThinkingBody,
    ToolChoice,
)
from moonshard.serving.gateway.messages.turns import messages_of
from moonshard.serving.gateway.openai import thinking as chats
from moonshard.serving.gateway.openai.body import ABSENT, is_nothing
from moonshard.serving.gateway.openai.formats import JsonSchemaFormat, ResponseFormat
from moonshard.serving.gateway.openai.requests import ChatBody
from moonshard.serving.gateway.openai.tools import Tool
from moonshard.serving.gateway.quoted import quoted
from moonshard.serving.gateway.request import GenerationRequest

# Not served, with the values beside null that ask for nothing.
NO_OPS: Mapping[str, Sequence[object]] = {
    "container": (),
    "mcp_servers": ([],),
}
NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_EDITS = ("clear_thinking_", "clear_tool_uses_")
_SCHEMA_NAME = "output"  # chats want one


def message_request(body: CountBody, *, request_id: str, received_ns: int) -> GenerationRequest:
    """InvalidArgument where the body asks for what is not served."""
    for name, accepted in NO_OPS.items():
        if not is_nothing(getattr(body, name), accepted):
            raise InvalidArgument(f"{name} is not supported", field=name)
    _check_edits(body.context_management)
    choice, output = body.tool_choice, body.output_config
    chat = ChatBody(
        **sampling_of(body),
        messages=messages_of(body.system, body.messages),
        model=body.model,
        max_tokens=body.max_tokens if isinstance(body, MessagesBody) else None,
        stop=body.stop_sequences,
        priority=body.priority,
        tools=None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=ABSENT if choice is None else raw(_tool_choice(choice)),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        thinking=_thinking(body.thinking),
        reasoning_effort=None if output is None else output.effort,
        response_format=None if output is None or output.format is None else _response_format(output.format),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return meant_by(chat, {**_tool_names(body.tools or ()), **NAMES}, request_id=request_id, received_ns=received_ns)


def _check_edits(context: ContextManagement | None) -> None:
    """What clears a conversation where it grows too long, as Claude Code asks for unasked: the template clears thoughts
    by its own rule, and nothing else is cleared.
    """
    for index, edit in enumerate((context and context.edits) or ()):
        if not edit.type.startswith(_EDITS):
            name = f"context_management.edits[{index}].type"
            raise InvalidArgument(f"{name}: {quoted(edit.type)} is not supported", field=name)


def _tool(tool: SchemaTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        name = f"{where}.type"
        raise InvalidArgument(f"{name}: {quoted(tool.type)} is not supported, only tools of the client's", field=name)
    if not tool.name:
        raise InvalidArgument(f"{where}.name is missing", field=f"{where}.name")
    said = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in said.items() if value is not None}}


def _tool_names(tools: Sequence[SchemaTool]) -> dict[str, str]:
    """A function's fields stand one level higher here, and its schema has another name."""
    names: dict[str, str] = {}
    for index in range(len(tools)):
        where = f"tools[{index}]"
        names |= {f"{where}.function.parameters": f"{where}.input_schema", f"{where}.function": where}
    return names


def _tool_choice(choice: ToolChoice) -> object:
    if choice.type == "tool":
        if not choice.name:
            raise InvalidArgument("tool_choice.name is missing", field="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        name = "tool_choice.type"
        raise InvalidArgument(f"{name}: must be auto, any, tool or none, not {quoted(choice.type)}", field=name)
    return _CHOICES[choice.type]


def _thinking(thinking: ThinkingBody | None) -> chats.ThinkingBody | None:
    """None leaves it to the model, which `adaptive` asks for too."""
    if thinking is None or thinking.type == "adaptive":
        return None
    return chats.ThinkingBody(type=thinking.type)


def _response_format(form: OutputFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    return ResponseFormat(type=form.type, json_schema=JsonSchemaFormat(name=_SCHEMA_NAME, schema=form.schema))
