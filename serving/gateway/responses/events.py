"""A response as server-sent events, numbered in their order.

Each item is added, told in pieces and done; the last event has the whole response.
"""

from collections.abc import Iterable

import msgspec

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import RequestError
from moonshard.serving.gateway.blocks import Block, Change
from moonshard.serving.gateway.pipeline.choice import CallsMade, PromptEvent
from moonshard.serving.gateway.responses.answers import Answer, part

_TEXT_EVENTS = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}

_encoder = msgspec.json.Encoder()


class Events:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_events = 0

    def set_prompt(self, event: PromptEvent) -> None:
        pass

    def calls(self, made: CallsMade) -> bytes:
        self._answer.blocks.calls(made)
        return b""

    def delta(self, delta: pb.Delta) -> bytes:
        return self._opening() + self._told(self._answer.blocks.delta(delta))

    def last(self, summary: pb.Summary) -> bytes:
        told = self._opening() + self._told(self._answer.end())
        response = msgspec.Raw(self._answer.ended(summary))
        return told + self._event(f"response.{self._answer.status}", response=response)

    def failed(self, error: RequestError) -> bytes:
        """What there is of it is told once more, whole items alone."""
        blocks = self._answer.blocks
        whole = blocks.all[:-1] if blocks.is_open else blocks.all
        response = self._answer.envelope.response("failed", list(map(self._answer.item, whole)), error=error)
        return self._opening() + self._event("response.failed", response=response)

    def _opening(self) -> bytes:
        """What comes before all else, once."""
        if self._num_events:
            return b""
        response = self._answer.envelope.response("in_progress", [])
        names = ("response.created", "response.in_progress")
        return b"".join([self._event(name, response=response) for name in names])

    def _told(self, changes: Iterable[Change]) -> bytes:
        return b"".join([self._change(change) for change in changes])

    def _change(self, change: Change) -> bytes:
        match change.step:
            case "begun":
                return self._begun(change.block)
            case "more":
                block, name = change.block, f"{_TEXT_EVENTS[change.block.kind]}.delta"
                logprobs = {"logprobs": []} if block.kind == "text" else {}
                return self._event(name, **self._place(block), delta=change.piece, **logprobs)
            case "ended":
                return self._ended(change.block)

    def _begun(self, block: Block) -> bytes:
        item = self._answer.begun(block)
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._event("response.content_part.added", **self._place(block), part=part(block, ""))

    def _ended(self, block: Block) -> bytes:
        name, place = f"{_TEXT_EVENTS[block.kind]}.done", self._place(block)
        match block.kind:
            case "call":
                told = self._event(name, **place, name=block.name, arguments=block.text)
            case "thought":
                told = self._event(name, **place, text=block.text)
            case "text":
                told = self._event(name, **place, text=block.text, logprobs=[])
        if block.kind != "call":
            told += self._event("response.content_part.done", **place, part=part(block, block.text))
        item = self._answer.item(block)
        return told + self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, object]:
        place: dict[str, object] = {"item_id": self._answer.envelope.item_id(block), "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _event(self, name: str, /, **fields: object) -> bytes:
        event = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"
