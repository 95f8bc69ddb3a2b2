"""An assistant's turn as a client of OpenAI's chat API has it: the calls as they were written, and what is sent back.

Shared by whoever keeps a conversation going over that API; conversations for training are made in
`experiments.training.texts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moonshard.experiments.training.texts.conversation import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCall:
    """A call as the assistant wrote it; its arguments are JSON that has not been parsed yet."""

    id: str
    name: str
    arguments: str


def assistant_message(content: str, calls: Sequence[WrittenCall]) -> Message:
    """The turn as it is sent back. A turn of calls without words has no content, any other the empty text."""
    if not calls:
        return {"role": "assistant", "content": content}
    written = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": written}


def result_message(call: WrittenCall, result: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": result}
