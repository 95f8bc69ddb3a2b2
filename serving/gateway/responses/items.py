"""The items of an input as the messages of a chat.

What an assistant did is one item for each thought, message and call; a chat's template takes one message for a turn of
it, as it was generated. A turn has one thought, before all else, and ends where anybody else's item follows.
"""

from collections.abc import Sequence

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.openai.body import is_nothing
from moonshard.serving.gateway.openai.messages import CalledFunction, CallMade, Message
from moonshard.serving.gateway.quoted import quoted
from moonshard.serving.gateway.responses.body import Item, Part

ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_SERVED = "message, function_call, function_call_output and reasoning"


def messages_of(given: str | Sequence[Item] | None) -> list[Message]:
    """InvalidArgument for what is not well formed and for what is not served, by its place in the input."""
    if not given:
        raise InvalidArgument("input: is empty" if given is not None else "input is missing", field="input")
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    for message in messages:
        if message.content is None and not message.tool_calls:  # a thought alone
            message.content = ""
    return messages


def _add(messages: list[Message], item: Item, where: str) -> None:
    match item.type:
        case None | "message":
            _add_message(messages, item, where)
        case "reasoning":
            _add_thought(messages, item, where)
        case "function_call":
            turn = _turn(messages, begins=False)
            turn.tool_calls = [*(turn.tool_calls or ()), _call(item, where)]
        case "function_call_output":
            output = _text(_given(item.output, f"{where}.output"), f"{where}.output")
            call_id = _given(item.call_id or None, f"{where}.call_id")
            messages.append(Message(role="tool", tool_call_id=call_id, content=output))
        case _:
            name = f"{where}.type"
            raise InvalidArgument(f"{name}: {quoted(item.type)} is not supported, only {_SERVED}", field=name)


def _add_message(messages: list[Message], item: Item, where: str) -> None:
    role = _given(item.role, f"{where}.role")
    if role not in ROLES:
        name = f"{where}.role"
        raise InvalidArgument(f"{name}: {quoted(role)} is not supported; use one of {', '.join(ROLES)}", field=name)
    text = _text(_given(item.content, f"{where}.content"), f"{where}.content")
    if role != "assistant":
        messages.append(Message(role=role, content=text))
        return
    last = messages[-1] if messages else None
    has_spoken = last is not None and last.content is not None and not last.tool_calls
    turn = _turn(messages, begins=has_spoken)
    turn.content = text if turn.content is None else f"{turn.content}{text}"


def _add_thought(messages: list[Message], item: Item, where: str) -> None:
    if item.content is None and item.encrypted_content:
        name = f"{where}.encrypted_content"
        raise InvalidArgument(f"{name} is not supported: send the thought as content", field=name)
    parts = [] if item.content is None else item.content
    thought = parts if isinstance(parts, str) else "".join(_thought(part, where) for part in parts)
    last = messages[-1] if messages else None
    has_begun = last is not None and (last.content is not None or bool(last.tool_calls))
    turn = _turn(messages, begins=has_begun)
    turn.reasoning_content = (turn.reasoning_content or "") + thought


def _turn(messages: list[Message], *, begins: bool) -> Message:
    """The assistant's turn that goes on, or a new one."""
    if begins or not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    return messages[-1]


def _call(item: Item, where: str) -> CallMade:
    function = CalledFunction(
        name=_given(item.name, f"{where}.name"), arguments=_given(item.arguments, f"{where}.arguments")
    )
    return CallMade(id=_given(item.call_id, f"{where}.call_id"), function=function)


def _text(content: str | Sequence[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(part, f"{where}[{number}]") for number, part in enumerate(content))


def _text_of(part: Part, where: str) -> str:
    if part.type not in _TEXTS or part.text is None:
        raise InvalidArgument(f"{where}: only text is supported, not {quoted(part.type)}", field=where)
    return part.text


def _thought(part: Part, where: str) -> str:
    if part.type not in ("reasoning_text", "text") or part.text is None or not is_nothing(part.refusal):
        name = f"{where}.content"
        raise InvalidArgument(f"{name}: only reasoning_text is supported, not {quoted(part.type)}", field=name)
    return part.text


def _given[T](value: T | None, where: str) -> T:
    if value is None:
        raise InvalidArgument(f"{where} is missing", field=where)
    return value
