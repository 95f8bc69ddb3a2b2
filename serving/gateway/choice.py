"""One choice of a request on its way out: a step's tokens become text and tool calls, and a stop string ends it.

The worker ends a choice by token or length; only here is text known, so only here can a string end it. Tokens that the
worker made after that are dropped and not billed. A stop string counts wherever it is written, in a call's arguments
too, as vLLM has it: the call is then cut off, and text.
"""

from contextlib import suppress
from dataclasses import dataclass

from moonshard.models.tokenizer import TokenIdError
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.serving.detokenizer import Detokenizer
from moonshard.serving.tool_calls import ToolCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class CallsMade:
    """Tool calls of one choice, each whole and valid. They come before the Delta of the tokens that completed them."""

    choice: int
    calls: tuple[ToolCall, ...]


class ChoiceStream:
    """`detokenizer` is None for a model without a tokenizer: token ids go out, text stays empty.

    `parser` is None for a request without tools; else the detokenizer marks what it reads.
    """

    def __init__(self, index: int, detokenizer: Detokenizer | None, parser: ToolCallParser | None = None) -> None:
        self.index = index
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self.is_worker_done = False  # the worker has sent its last output of this choice
        self.token_ids: list[int] = []  # all that workers gave, until it ended; shown or not
        self._detokenizer = detokenizer
        self._parser = parser
        self._calls: tuple[ToolCall, ...] = ()

    @property
    def is_ended(self) -> bool:
        return self.finish_reason != pb.FINISH_REASON_UNSPECIFIED

    def accept(self, output: link_pb2.SequenceOutput) -> pb.Delta | None:
        """What to tell the client of a step's output; None once the choice has ended."""
        self.is_worker_done = output.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if self.is_ended:
            return None
        self.token_ids.extend(output.token_ids)
        delta = pb.Delta(choice=self.index, finish_reason=output.finish_reason)
        num_kept = len(output.token_ids)
        if self._detokenizer is not None:
            text, num_kept = self._text(delta, self._detokenizer, output)
            delta.text = text if self._parser is None else self._content(delta, self._parser, text)
        delta.token_ids.extend(output.token_ids[:num_kept])
        delta.logprobs.extend(output.logprobs[:num_kept])
        if delta.finish_reason == pb.FINISH_REASON_STOP and not delta.HasField("stop_string") and num_kept:
            delta.stop_token_id = output.token_ids[-1]
        self.finish_reason = delta.finish_reason
        return delta

    def take_calls(self) -> CallsMade | None:
        """What the last `accept` completed; None: nothing."""
        calls, self._calls = self._calls, ()
        return CallsMade(self.index, calls) if calls else None

    def _content(self, delta: pb.Delta, parser: ToolCallParser, text: str) -> str:
        """What of the text is for the client to read; its calls are kept for `take_calls`."""
        parsed = parser.push(text)
        self._calls += parsed.calls
        is_last = delta.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        return parsed.content + parser.finish() if is_last else parsed.content

    @staticmethod
    def _text(delta: pb.Delta, detokenizer: Detokenizer, output: link_pb2.SequenceOutput) -> tuple[str, int]:
        """The step's text and how many of its tokens count. Sets the delta's finish where a stop string ends it.

        A stop token gives no text, special or not. Neither does an id that the model has and the tokenizer has not.
        """
        num_tokens = len(output.token_ids)
        num_spoken = num_tokens - (output.finish_reason == pb.FINISH_REASON_STOP)
        pieces: list[str] = []
        for index, token in enumerate(output.token_ids[: max(num_spoken, 0)]):
            with suppress(TokenIdError):
                pieces.append(detokenizer.push((token,)).text)
            if detokenizer.stop_string is not None:
                num_tokens = index + 1
                break
        if output.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            pieces.append(detokenizer.finish())
        if detokenizer.stop_string is not None:
            delta.stop_string, delta.finish_reason = detokenizer.stop_string, pb.FINISH_REASON_STOP
        return "".join(pieces), num_tokens
