"""Tool calls in OpenAI's shapes: in the message of a whole choice, and as the parts of a stream."""

from collections.abc import Iterator, Sequence
from typing import Any

from moonshard.rpc.codec import whole_calls
from moonshard.rpc.types import ToolCall, ToolCallPart
from moonshard.serving.gateway.pipeline.choice import CallsMade


def with_calls(choice: dict[str, Any], text: str, parts: Sequence[ToolCallPart]) -> dict[str, object]:
    """A whole choice of a chat with these calls in its message; the choice as it is where there are none."""
    if not parts:
        return choice
    calls = list(map(_whole, whole_calls(parts)))
    return {**choice, "message": {**choice["message"], "content": text or None, "tool_calls": calls}}


def chunk_choices(made: CallsMade) -> Iterator[dict[str, object]]:
    """The choices of a stream that clients expect for calls: first the function's name, then its arguments in
    pieces.
    """
    for part in made.calls:
        told: dict[str, object] = {"index": part.index}
        if part.id:
            told |= {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
        else:
            told["function"] = {"arguments": part.arguments}
        yield {"index": made.choice, "delta": {"tool_calls": [told]}, "logprobs": None, "finish_reason": None}


def _whole(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
