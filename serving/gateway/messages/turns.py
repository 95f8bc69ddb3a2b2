"""The turns of a conversation as the messages of a chat.

A turn of the assistant is one message of its thought, its text and its calls, in that order, as a template writes it
and the model generated it; a thought after these begins another. Results of tools are messages of their own, each where
it stands among the user's texts. An assistant's text that comes last is gone on with.
"""

import json
from collections.abc import Sequence

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.messages.body import InnerBlock, Turn, TurnBlock
from moonshard.serving.gateway.openai.messages import CalledFunction, CallMade, Message, TextPart
from moonshard.serving.gateway.quoted import quoted

ROLES = ("user", "assistant", "system")


def messages_of(system: str | Sequence[InnerBlock] | None, turns: Sequence[Turn]) -> list[Message]:
    """InvalidArgument for what is not well formed and for what is not served, by its place."""
    if not turns:
        raise InvalidArgument("messages: is empty", field="messages")
    messages = [Message(role="system", content=_text(system, "system"))] if system else []
    for index, turn in enumerate(turns):
        messages += _turn(turn, f"messages[{index}]")
    last = messages[-1]
    if last.role == "assistant" and last.content and not last.tool_calls:
        last.partial = True
    return messages


def _turn(turn: Turn, where: str) -> list[Message]:
    if turn.role not in ROLES:
        name, roles = f"{where}.role", ", ".join(ROLES)
        raise InvalidArgument(f"{name}: {quoted(turn.role)} is not supported; use one of {roles}", field=name)
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    if turn.role == "assistant":
        return _assistants(turn.content, f"{where}.content")
    return _users(turn.role, turn.content, f"{where}.content")


def _users(role: str, blocks: Sequence[TurnBlock], where: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[TextPart] = []  # since the last result
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.type == "tool_result" and role == "user":
            messages += _said(role, texts)
            texts = []
            messages.append(_result(block, place))
        else:
            texts.append(TextPart(type="text", text=_text_of(block, place)))
    return messages + _said(role, texts, is_needed=not messages)


def _said(role: str, texts: list[TextPart], *, is_needed: bool = False) -> list[Message]:
    return [Message(role=role, content=texts)] if texts or is_needed else []


def _result(block: TurnBlock, where: str) -> Message:
    call_id = _given(block.tool_use_id or None, f"{where}.tool_use_id")
    content = "" if block.content is None else _text(block.content, f"{where}.content")
    return Message(role="tool", tool_call_id=call_id, content=content)


def _assistants(blocks: Sequence[TurnBlock], where: str) -> list[Message]:
    turns = [Message(role="assistant")]
    for number, block in enumerate(blocks):
        place, turn = f"{where}[{number}]", turns[-1]
        match block.type:
            case "thinking":
                if turn.content is not None or turn.tool_calls:
                    turns.append(turn := Message(role="assistant"))
                turn.reasoning_content = (turn.reasoning_content or "") + _given(block.thinking, f"{place}.thinking")
            case "tool_use":
                turn.tool_calls = [*(turn.tool_calls or ()), _call(block, place)]
            case _:
                turn.content = f"{turn.content or ''}{_text_of(block, place)}"
    for turn in turns:
        if turn.content is None and not turn.tool_calls:
            turn.content = ""
    return turns


def _call(block: TurnBlock, where: str) -> CallMade:
    """The arguments as models mostly write them: as JSON with blanks, and characters as they are."""
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    function = CalledFunction(name=_given(block.name, f"{where}.name"), arguments=arguments)
    return CallMade(id=_given(block.id, f"{where}.id"), function=function)


def _text(content: str | Sequence[InnerBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(block, f"{where}[{number}]") for number, block in enumerate(content))


def _text_of(block: InnerBlock | TurnBlock, where: str) -> str:
    if block.type != "text":
        name = f"{where}.type"
        raise InvalidArgument(f"{name}: {quoted(block.type)} is not supported here", field=name)
    return _given(block.text, f"{where}.text")


def _given[T](value: T | None, where: str) -> T:
    if value is None:
        raise InvalidArgument(f"{where} is missing", field=where)
    return value
