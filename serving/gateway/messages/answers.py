"""The pipeline's events as a message: whole, or told by events that add up to it.

Of a call that was cut off a whole message has no input, since what there is of it is no object; a stream tells it as
far as it came. Thoughts have a signature, without which clients do not send them back, and which says nothing.
"""

from collections.abc import Iterable

import msgspec

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import RequestError
from moonshard.serving.gateway.blocks import Block, Blocks, Change
from moonshard.serving.gateway.messages.errors import anthropic_error
from moonshard.serving.gateway.pipeline.choice import CallsMade, PromptEvent

ID_PREFIX = "msg_"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
SIGNATURE = "unsigned"

_encoder = msgspec.json.Encoder()
_INPUT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Answer:
    """One message as it arrives."""

    def __init__(self, message_id: str, model: str) -> None:
        self.blocks = Blocks()
        self._id = message_id
        self._model = model

    def message(self, content: list[dict[str, object]], usage: dict[str, int]) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self.stop(),
            "usage": usage,
        }

    def stop(self) -> dict[str, str | None]:
        """Why it ended; null in both fields until it has."""
        match self.blocks.finish_reason:
            case None:
                return {"stop_reason": None, "stop_sequence": None}
            case "length":
                return {"stop_reason": "max_tokens", "stop_sequence": None}
            case "tool_calls":
                return {"stop_reason": "tool_use", "stop_sequence": None}
            case "stop":
                stop = self.blocks.stop_string
                return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}


class Whole:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def add(self, event: PromptEvent | CallsMade | pb.Delta) -> None:
        self._answer.blocks.add(event)

    def body(self, summary: pb.Summary) -> bytes:
        content = list(map(_whole, self._answer.blocks.all))
        return _encoder.encode(self._answer.message(content, usage_object(summary.usage)))


class Events:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_prompt = 0
        self._is_begun = False

    def set_prompt(self, event: PromptEvent) -> None:
        if isinstance(event, pb.TokenIds):
            self._num_prompt = len(event.ids)

    def calls(self, made: CallsMade) -> bytes:
        self._answer.blocks.calls(made)
        return b""

    def delta(self, delta: pb.Delta) -> bytes:
        opening = self._opening()  # before the answer knows that it has ended
        return opening + self._told(self._answer.blocks.delta(delta))

    def last(self, summary: pb.Summary) -> bytes:
        told = self._opening() + self._told(self._answer.blocks.finish())
        told += _event("message_delta", delta=self._answer.stop(), usage=usage_object(summary.usage))
        return told + _event("message_stop")

    def failed(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + _encoder.encode(anthropic_error(error)) + b"\n\n"

    def _opening(self) -> bytes:
        """What comes before all else, once. How much of the prompt was cached is known at the end."""
        if self._is_begun:
            return b""
        self._is_begun = True
        usage = _usage(self._num_prompt, num_cached=0, num_output=0)
        return _event("message_start", message=self._answer.message([], usage)) + PING

    def _told(self, changes: Iterable[Change]) -> bytes:
        return b"".join([_told(change) for change in changes])


def usage_object(usage: pb.Usage) -> dict[str, int]:
    return _usage(usage.prompt_tokens, num_cached=usage.cached_tokens, num_output=usage.completion_tokens)


def _usage(num_prompt: int, *, num_cached: int, num_output: int) -> dict[str, int]:
    """A prompt's tokens, apart from those that were cached."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def _told(change: Change) -> bytes:
    block = change.block
    match change.step:
        case "begun":
            return _event("content_block_start", index=block.index, content_block=_begun(block))
        case "more":
            return _event("content_block_delta", index=block.index, delta=_delta(block, change.piece))
        case "ended":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", index=block.index, delta=signature)
            return (signed if block.kind == "thought" else b"") + _event("content_block_stop", index=block.index)


def _begun(block: Block) -> dict[str, object]:
    match block.kind:
        case "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: Block, piece: str) -> dict[str, object]:
    match block.kind:
        case "thought":
            return {"type": "thinking_delta", "thinking": piece}
        case "text":
            return {"type": "text_delta", "text": piece}
        case "call":
            return {"type": "input_json_delta", "partial_json": piece}


def _whole(block: Block) -> dict[str, object]:
    match block.kind:
        case "thought":
            return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
        case "text":
            return {"type": "text", "text": block.text}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> msgspec.Raw:
    """The arguments as they were written; an empty object where they are cut off."""
    try:
        _INPUT.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(b"{}")
    return msgspec.Raw(arguments.encode())


def _event(name: str, /, **fields: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode({"type": name, **fields}) + b"\n\n"
