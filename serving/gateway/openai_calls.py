"""Tool calls in OpenAI's shapes: in a whole choice, and as the parts of a stream.

A choice with calls that ends as the model meant it to ends with `tool_calls`. Cut off after them it keeps `length`:
more calls might have come.
"""

from collections.abc import Iterator, Sequence

from moonshard.serving.tool_calls import ToolCall


def with_calls(choice: dict[str, object], text: str, calls: Sequence[ToolCall]) -> dict[str, object]:
    """A whole choice of a chat, with these calls in its message."""
    message = {"role": "assistant", "content": text or None, "refusal": None, "tool_calls": list(map(_whole, calls))}
    return with_finish(choice) | {"message": message}


def with_finish(choice: dict[str, object]) -> dict[str, object]:
    """A choice that has calls, whole or the chunk that ends it, with the finish that says so."""
    return choice | {"finish_reason": "tool_calls"} if choice["finish_reason"] == "stop" else choice


def chunk_choices(choice: int, calls: Sequence[ToolCall], first: int) -> Iterator[dict[str, object]]:
    """A stream's choices, two a call, as clients expect them: who is called, then with what. `first`: call's index."""
    for index, call in enumerate(calls, start=first):
        begun = _whole(call) | {"index": index, "function": {"name": call.name, "arguments": ""}}
        for part in (begun, {"index": index, "function": {"arguments": call.arguments}}):
            yield {"index": choice, "delta": {"tool_calls": [part]}, "logprobs": None, "finish_reason": None}


def _whole(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
