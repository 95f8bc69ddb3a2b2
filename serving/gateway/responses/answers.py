"""The pipeline's events as a response object: whole, or told by events that add up to it.

Both ways make each item once, of the same block, and end in the same object. An answer that says nothing at all has an
empty message, since clients wait for one; one that was cut off before its first word has none.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import InvalidArgument, Overloaded, RequestError
from moonshard.serving.gateway.blocks import Block, Blocks, Change
from moonshard.serving.gateway.openai.body import ABSENT
from moonshard.serving.gateway.openai.responses import cached_object
from moonshard.serving.gateway.pipeline.choice import CallsMade, PromptEvent
from moonshard.serving.gateway.responses.body import ResponsesBody

ID_PREFIX = "resp_"
_ITEM_PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """What every object of one response repeats of the request, under the request's own names."""

    id: str
    model: str
    asked: Mapping[str, object]
    created_at: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, body: ResponsesBody, *, response_id: str, model: str, is_stored: bool) -> "Envelope":
        reasoning, text = body.reasoning, body.text
        asked = {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
            "store": is_stored,
            "temperature": getattr(body, "temperature"),  # noqa: B009 # the table's, which no type checker knows
            "text": {"format": (text and text.format) or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice == ABSENT else body.tool_choice,
            "tools": body.tools or [],
            "top_p": getattr(body, "top_p"),  # noqa: B009
            "truncation": "disabled",
            "user": body.user,
        }
        return cls(id=response_id, model=model, asked=asked)

    def response(
        self,
        status: str,
        output: list[dict[str, object]],
        usage: pb.Usage | None = None,
        error: RequestError | None = None,
    ) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "usage": None if usage is None else usage_object(usage),
            **self.asked,
        }

    def item_id(self, block: Block) -> str:
        return f"{_ITEM_PREFIXES[block.kind]}_{self.id.removeprefix(ID_PREFIX)}_{block.index}"


class Answer:
    """One response as it arrives. `keep` is given it when it has ended well."""

    def __init__(self, envelope: Envelope, keep: Callable[[Blocks, bytes], None]) -> None:
        self.envelope = envelope
        self.blocks = Blocks()
        self._keep = keep

    def end(self) -> Iterator[Change]:
        if not self.is_cut_off and all(block.kind == "thought" for block in self.blocks.all):
            yield from self.blocks.begin_text()
        yield from self.blocks.finish()

    @property
    def is_cut_off(self) -> bool:
        return self.blocks.finish_reason == "length"

    @property
    def status(self) -> str:
        return "incomplete" if self.is_cut_off else "completed"

    def ended(self, summary: pb.Summary) -> bytes:
        """The whole response, which is kept from now on."""
        output = [self.item(block) for block in self.blocks.all]
        response = _encoder.encode(self.envelope.response(self.status, output, summary.usage))
        self._keep(self.blocks, response)
        return response

    def item(self, block: Block) -> dict[str, object]:
        """A block that has ended."""
        is_cut_off = self.is_cut_off and block is self.blocks.all[-1]
        item = self.begun(block) | {"status": "incomplete" if is_cut_off else "completed"}
        if block.kind == "call":
            return item | {"arguments": block.text}
        return item | {"content": [part(block, block.text)]}

    def begun(self, block: Block) -> dict[str, object]:
        head = {"id": self.envelope.item_id(block), "status": "in_progress"}
        match block.kind:
            case "thought":
                return {"type": "reasoning", **head, "summary": [], "content": []}
            case "text":
                return {"type": "message", **head, "role": "assistant", "content": []}
            case "call":
                return {
                    "type": "function_call",
                    **head,
                    "call_id": block.call_id,
                    "name": block.name,
                    "arguments": "",
                }


class Whole:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def add(self, event: PromptEvent | CallsMade | pb.Delta) -> None:
        self._answer.blocks.add(event)

    def body(self, summary: pb.Summary) -> bytes:
        for _ in self._answer.end():
            pass
        return self._answer.ended(summary)


def part(block: Block, text: str) -> dict[str, object]:
    """The one part of a message's content, or of a thought's."""
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_object(usage: pb.Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached_object(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(error: RequestError) -> dict[str, str]:
    match error:
        case Overloaded():
            code = "rate_limit_exceeded"
        case InvalidArgument():
            code = "invalid_prompt"
        case _:
            code = "server_error"
    return {"code": code, "message": error.message}
