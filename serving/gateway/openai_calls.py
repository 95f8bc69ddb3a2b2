"""Tool calls in OpenAI's shapes: in a whole choice, and as the parts of a stream.

A choice with calls that ends as the model meant it to ends with `tool_calls`. Cut off after them it keeps `length`:
more calls might have come. Cut off within one it keeps what cut it off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from moonshard.serving.gateway.choice import CallsMade
from moonshard.serving.tool_calls import CallPart, ToolCall, whole_calls


@final
@dataclass(slots=True)
class ChoiceCalls:
    """The calls of one choice, as they come."""

    is_cut: bool = False
    _parts: list[CallPart] = field(default_factory=list)

    def add(self, made: CallsMade) -> None:
        self.is_cut = made.is_cut
        self._parts += made.calls

    def with_calls(self, choice: dict[str, object], text: str) -> dict[str, object]:
        """A whole choice of a chat, with these calls in its message; as it is where there are none."""
        if not self._parts:
            return choice
        calls = list(map(_whole, whole_calls(self._parts)))
        message = {"role": "assistant", "content": text or None, "refusal": None, "tool_calls": calls}
        return self.with_finish(choice) | {"message": message}

    def with_finish(self, choice: dict[str, object]) -> dict[str, object]:
        """A choice, whole or the chunk that ends it, with the finish that says that it has calls."""
        is_meant = bool(self._parts) and not self.is_cut and choice["finish_reason"] == "stop"
        return choice | {"finish_reason": "tool_calls"} if is_meant else choice


def chunk_choices(made: CallsMade) -> Iterator[dict[str, object]]:
    """A stream's choices, as clients expect them: who is called, then with what, in pieces."""
    for part in made.calls:
        told: dict[str, object] = {"index": part.index}
        if part.id is None:
            told["function"] = {"arguments": part.arguments}
        else:
            told |= {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
        yield {"index": made.choice, "delta": {"tool_calls": [told]}, "logprobs": None, "finish_reason": None}


def _whole(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
