"""The messages of a chat: OpenAI's shapes, and the dicts that chat templates take.

Content becomes one string; a turn that only calls tools has none, which the template is given as None. A call's
arguments stay the string that the client sent: Kimi's template writes a string as it is, so that a turn sent back is
the tokens that were generated. Reasoning that is sent back is for the template to write or to leave out.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.openai.body import ABSENT, is_nothing
from moonshard.serving.gateway.quoted import quoted

ROLES = ("system", "developer", "user", "assistant", "tool")
_UNSERVED = ("function_call", "refusal", "audio", "annotations")
_OF_ROLE = {  # fields that one role alone may have
    "tool_calls": "assistant",
    "tool_call_id": "tool",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
}


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    image_url: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    video_url: msgspec.Raw = ABSENT
    file: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT  # prefixes are cached unasked


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    parsed_arguments: msgspec.Raw = ABSENT  # the arguments once more, as OpenAI's client adds them to what it receives


class CallMade(msgspec.Struct, kw_only=True):
    id: str
    function: CalledFunction
    type: Literal["function"] | None = None
    index: float | None = None  # a stream's chunks have it, and clients that add them up send it back
    cache_control: msgspec.Raw = ABSENT


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallMade] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its other name
    partial: bool | None = None  # Kimi's: the answer goes on with this message, which is the last one
    cache_control: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    refusal: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    annotations: msgspec.Raw = ABSENT
    parsed: msgspec.Raw = ABSENT  # the content once more, as OpenAI's client adds it


def chat_messages(messages: Sequence[Message], path: str = "messages") -> list[dict[str, object]]:
    """Messages as chat templates take them; `path` is what their client calls them.

    InvalidArgument for what is no text, and for fields of another role.
    """
    if not messages:
        raise InvalidArgument(f"{path}: is empty", field=path)
    for index, message in enumerate(messages[:-1]):
        if message.partial:
            name = f"{path}[{index}].partial"
            raise InvalidArgument(f"{name}: only the last message can be gone on with", field=name)
    return [_message(message, f"{path}[{index}]") for index, message in enumerate(messages)]


def goes_on(messages: Sequence[Message], path: str = "messages") -> bool:
    """Whether the answer is the rest of the last message. InvalidArgument where that one has no text to go on from."""
    if not messages or not messages[-1].partial:
        return False
    return check_text_of_assistant(messages, f"{path}[{len(messages) - 1}].partial")


def check_text_of_assistant(messages: Sequence[Message], name: str) -> bool:
    """True where the last message is one to go on with. InvalidArgument elsewhere, for the field `name`, which asks."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls or last.content is None:
        raise InvalidArgument(f"{name}: only for an assistant's message of text", field=name)
    return True


def _message(message: Message, where: str) -> dict[str, object]:
    _check_fields(message, where)
    role = "system" if message.role == "developer" else message.role
    said: dict[str, object] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        said["name"] = message.name
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        said["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        said["reasoning_content"] = reasoning
    return said


def _check_fields(message: Message, where: str) -> None:
    if message.role not in ROLES:
        raise InvalidArgument(
            f"{where}.role: {quoted(message.role)} is not supported; use one of {', '.join(ROLES)}",
            field=f"{where}.role",
        )
    for name in _UNSERVED:
        if not is_nothing(getattr(message, name), ([], "")):
            raise InvalidArgument(f"{where}.{name} is not supported", field=f"{where}.{name}")
    for name, role in _OF_ROLE.items():
        if getattr(message, name) and message.role != role:
            raise InvalidArgument(f"{where}.{name}: only for the role {role!r}", field=f"{where}.{name}")
    if message.role == "tool" and not message.tool_call_id:
        name = f"{where}.tool_call_id"
        raise InvalidArgument(f"{name}: which call this is the result of is missing", field=name)


def _content(message: Message, where: str) -> str | None:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.tool_calls:
            return None
        raise InvalidArgument(f"{where}.content is missing", field=f"{where}.content")
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            name = f"{where}.content[{number}]"
            raise InvalidArgument(f"{name}: only text parts are supported, not {quoted(part.type)}", field=name)
    return "".join(part.text or "" for part in message.content)
