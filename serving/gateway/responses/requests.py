"""What a request for a response means: the chat of its instructions, of what came before, and of its input."""

from collections.abc import Mapping, Sequence

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.chats import meant_by, raw, sampling_of
from moonshard.serving.gateway.openai.body import ABSENT, is_nothing
from moonshard.serving.gateway.openai.formats import JsonSchemaFormat, ResponseFormat
from moonshard.serving.gateway.openai.messages import Message
from moonshard.serving.gateway.openai.requests import ChatBody
from moonshard.serving.gateway.openai.tools import Tool
from moonshard.serving.gateway.quoted import quoted
from moonshard.serving.gateway.request import GenerationRequest
from moonshard.serving.gateway.responses.body import FlatTool, ResponsesBody, TextFormat

# Not served, with the values beside null that ask for nothing.
NO_OPS: Mapping[str, Sequence[object]] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# Further output that may be asked for and that there is none of: of tools that are not served, of pictures, and
# thoughts in a form that only their server reads, which here are told in the clear.
INCLUDED = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}


def response_request(
    body: ResponsesBody,
    earlier: Sequence[Message],
    said: Sequence[Message],
    *,
    request_id: str,
    received_ns: int,
) -> GenerationRequest:
    """`earlier`: the conversation that this goes on from; `said`: the messages of the input.

    InvalidArgument where the body asks for what is not served.
    """
    _refuse_unserved(body)
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    reasoning, text = body.reasoning, body.text
    chat = ChatBody(
        **sampling_of(body),
        messages=[*instructions, *earlier, *said],
        model=body.model,
        max_tokens=body.max_output_tokens,
        priority=body.priority,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if reasoning is None else reasoning.effort,
        response_format=None if text is None or text.format is None else _response_format(text.format),
        verbosity=ABSENT if text is None else raw(text.verbosity),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return meant_by(chat, {**_tool_names(body.tools or ()), **NAMES}, request_id=request_id, received_ns=received_ns)


def _refuse_unserved(body: ResponsesBody) -> None:
    for name, accepted in NO_OPS.items():
        if not is_nothing(getattr(body, name), accepted):
            raise InvalidArgument(f"{name} is not supported", field=name)
    for index, wanted in enumerate(body.include or ()):
        if wanted not in INCLUDED:
            name = f"include[{index}]"
            raise InvalidArgument(f"{name}: {quoted(wanted)} is not supported", field=name)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise InvalidArgument(f"{name} is not supported", field=name)


def _tools(tools: Sequence[FlatTool] | None) -> list[Tool] | None:
    return None if tools is None else [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: FlatTool, where: str) -> Tool:
    if tool.type != "function":
        name = f"{where}.type"
        raise InvalidArgument(f"{name}: only functions are supported, not {quoted(tool.type)}", field=name)
    if not tool.name:
        raise InvalidArgument(f"{where}.name is missing", field=f"{where}.name")
    said = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in said.items() if value is not None}}


def _tool_names(tools: Sequence[FlatTool]) -> dict[str, str]:
    """A function's fields stand one level higher here."""
    return {f"tools[{index}].function": f"tools[{index}]" for index in range(len(tools))}


def _tool_choice(choice: msgspec.Raw) -> msgspec.Raw:
    """As chats have it: a function's name stands one level deeper there. What is neither is passed on."""
    if is_nothing(choice) or memoryview(choice)[:1].tobytes() != b"{":
        return choice
    try:
        said = msgspec.json.decode(choice, type=dict[str, object])
    except ValueError:  # bytes that are no UTF-8, too
        return choice
    if said.get("type") != "function" or "name" not in said:
        return choice
    return raw({"type": "function", "function": {"name": said["name"]}})


def _response_format(form: TextFormat) -> ResponseFormat:
    """As chats have it: a schema and its name stand one level deeper there."""
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    schema = JsonSchemaFormat(name=form.name, description=form.description, schema=form.schema, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)
