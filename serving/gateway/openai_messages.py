"""The messages of a chat: OpenAI's shapes, and the dicts that chat templates take.

Content becomes one string; a turn that only calls tools has none, which the template is given as None. A call's
arguments stay the string that the client sent: Kimi's template writes a string as it is, so that a turn sent back is
the tokens that were generated.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from moonshard.rpc.status import InvalidArgument

ROLES = ("system", "developer", "user", "assistant", "tool")
_UNSERVED = ("function_call", "refusal", "audio", "annotations", "reasoning_content")
_OF_ROLE = {"tool_calls": "assistant", "tool_call_id": "tool"}  # fields that one role alone may have


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    image_url: object = None
    input_audio: object = None
    video_url: object = None
    file: object = None


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    parsed_arguments: object = None  # the arguments once more, as OpenAI's client adds them to what it receives


class CallMade(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # a stream's chunks have it, and clients that add them up send it back


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallMade] | None = None
    tool_call_id: str | None = None
    function_call: object = None
    refusal: object = None
    audio: object = None
    annotations: object = None
    reasoning_content: object = None
    parsed: object = None  # the content once more, as OpenAI's client adds it


def chat_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages as chat templates take them. InvalidArgument for what is no text, and for fields of another role."""
    if not messages:
        raise InvalidArgument("messages: is empty", field="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


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
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        said["tool_call_id"] = message.tool_call_id
    return said


def _check_fields(message: Message, where: str) -> None:
    if message.role not in ROLES:
        raise InvalidArgument(
            f"{where}.role: {message.role!r} is not supported; use one of {', '.join(ROLES)}", field=f"{where}.role"
        )
    for name in _UNSERVED:
        if getattr(message, name) not in (None, []):
            raise InvalidArgument(f"{where}.{name} is not supported", field=f"{where}.{name}")
    for name, role in _OF_ROLE.items():
        if getattr(message, name) not in (None, []) and message.role != role:
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
            raise InvalidArgument(f"{name}: only text parts are supported, not {part.type!r}", field=name)
    return "".join(part.text or "" for part in message.content)
