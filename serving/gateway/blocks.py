"""An answer as a sequence of blocks: what the model thought, said and called, one after another.

A chat's message has a field for each of these. Other APIs tell them in order, each begun, gone on with and ended; there
a whole answer and a stream are made of the same changes, so that they say the same. Blocks come in the order in which
they were generated, as far as the pipeline tells it: of what one step gave, thoughts come first, and text before a call
that begins in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, final

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.codec import decode_finish_reason
from moonshard.rpc.types import FinishReason, ToolCallPart
from moonshard.serving.gateway.openai.messages import CalledFunction, CallMade, Message
from moonshard.serving.gateway.pipeline.choice import CallsMade, PromptEvent

type Kind = Literal["thought", "text", "call"]


@dataclass(kw_only=True, slots=True)
class Block:
    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""  # of the function
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What was thought or said; a call's arguments, as they were written."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Change:
    step: Literal["begun", "more", "ended"]
    block: Block
    piece: str = ""


@final
class Blocks:
    """The blocks of one answer, as it arrives."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        self.is_open = False  # the last one
        self._made: list[ToolCallPart] = []  # what comes with the next delta

    def add(self, event: PromptEvent | CallsMade | pb.Delta) -> None:
        """Takes an event of the pipeline's, of which nobody is told before the end."""
        if isinstance(event, CallsMade):
            self.calls(event)
        elif isinstance(event, pb.Delta):
            for _ in self.delta(event):
                pass

    def calls(self, made: CallsMade) -> None:
        self._made += made.calls

    def delta(self, delta: pb.Delta) -> Iterator[Change]:
        made, self._made = self._made, []
        yield from self._more("thought", delta.reasoning)
        while made and not made[0].id:  # they belong to a call that has begun
            yield from self._call(made.pop(0))
        yield from self._more("text", delta.text)
        for part in made:
            yield from self._call(part)
        if delta.finish_reason:
            self.finish_reason = decode_finish_reason(delta.finish_reason)
            self.stop_string = delta.stop_string if delta.HasField("stop_string") else None

    def finish(self) -> Iterator[Change]:
        if self.is_open:
            self.is_open = False
            yield Change("ended", self.all[-1])

    def begin_text(self) -> Iterator[Change]:
        """Begins a text of which nothing may come."""
        yield from self._begin("text")

    def message(self) -> Message:
        """The answer as an assistant's message of a chat that goes on."""
        of: dict[Kind, list[Block]] = {"thought": [], "text": [], "call": []}
        for block in self.all:
            of[block.kind].append(block)
        calls = [
            CallMade(id=block.call_id, function=CalledFunction(name=block.name, arguments=block.text))
            for block in of["call"]
        ]
        text = "".join(block.text for block in of["text"])
        return Message(
            role="assistant",
            content=text or (None if calls else ""),
            tool_calls=calls or None,
            reasoning_content="".join(block.text for block in of["thought"]) or None,
        )

    def _call(self, part: ToolCallPart) -> Iterator[Change]:
        if part.id:
            yield from self._begin("call", part.id, part.name)
        yield from self._more("call", part.arguments)

    def _more(self, kind: Kind, piece: str) -> Iterator[Change]:
        if not piece:
            return
        if not self.is_open or self.all[-1].kind != kind:
            yield from self._begin(kind)
        self.all[-1].pieces.append(piece)
        yield Change("more", self.all[-1], piece)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self.finish()
        self.all.append(Block(index=len(self.all), kind=kind, call_id=call_id, name=name))
        self.is_open = True
        yield Change("begun", self.all[-1])
