"""One choice of a request on its way out: a step's tokens become text and tool calls, and a stop string ends it.

The worker ends a choice by token or length; only here is text known, so only here can a string end it. Tokens that the
worker made after that are dropped and not billed. A stop string counts wherever it is written, in a call's arguments
too, as vLLM has it: the call is then cut off. It does not count in a call that the client forced: those tokens are no
worker's, and come before all others.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from moonshard.models.tokenizers.tokenizer import TokenIdError, Tokenizer
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.rpc.types import ToolCallPart
from moonshard.serving.chat.detokenizer import Detokenizer
from moonshard.serving.chat.thoughts import NAMES as THOUGHT_NAMES
from moonshard.serving.chat.thoughts import THOUGHT_BEGIN, THOUGHT_END, Start, ThoughtParser
from moonshard.serving.chat.tool_calls import (
    ARGUMENTS_BEGIN,
    CALL_BEGIN,
    CALL_END,
    NAMES,
    SECTION_BEGIN,
    ToolCallParser,
    free_call_id,
)

type PromptEvent = pb.TokenIds | pb.PromptLogprobs  # what is told of a prompt; the latter where it is asked for

_UNFINISHED = pb.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class CallsMade:
    """Parts of one choice's tool calls. They come before the Delta of the tokens that gave them."""

    choice: int
    calls: tuple[ToolCallPart, ...]


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """How an answer begins that is to call a certain function: with these tokens, whose text has marks."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Opening:
    """How every choice begins. `start`: None where the answer has no thought to be told from the rest."""

    start: Start | None = None
    forced: ForcedCall | None = None

    @property
    def num_forced(self) -> int:
        return 0 if self.forced is None else len(self.forced.token_ids)


def forced_call(tokenizer: Tokenizer, name: str, call_ids: Collection[str], start: Start | None = None) -> ForcedCall:
    """`call_ids`: of the conversation's calls so far. The tokenizer has the markers of tool calls.

    An answer that would begin with a thought has an empty one, as templates write a turn without: sent back, the turn
    is the tokens that were generated.
    """
    call_id = free_call_id(name, str(len(call_ids)), call_ids)
    unthought = {"inside": (THOUGHT_END,), "before": (THOUGHT_BEGIN, THOUGHT_END), None: ()}[start]
    thought = tuple(tokenizer.special_tokens[THOUGHT_NAMES[mark]] for mark in unthought)
    section, call, arguments = (
        tokenizer.special_tokens[NAMES[mark]] for mark in (SECTION_BEGIN, CALL_BEGIN, ARGUMENTS_BEGIN)
    )
    return ForcedCall(
        token_ids=(*thought, section, call, *tokenizer.encode(call_id), arguments),
        text="".join(unthought) + SECTION_BEGIN + CALL_BEGIN + call_id + ARGUMENTS_BEGIN,
    )


class ChoiceStream:
    """`detokenizer` is None for a model without a tokenizer: token ids go out, text stays empty.

    `parser` is None for a request without tools, `thoughts` where the answer has none to be told from the rest; else
    the detokenizer marks what they read. `call_end` is a stop token that the client knows nothing of: the marker after
    which one call is enough.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer | None,
        parser: ToolCallParser | None = None,
        *,
        thoughts: ThoughtParser | None = None,
        forced: ForcedCall | None = None,
        call_end: int | None = None,
    ) -> None:
        self.index = index
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self.is_worker_done = False  # the worker has sent its last output of this choice
        self.token_ids: list[int] = []  # all that workers gave, until it ended; shown or not
        self._detokenizer = detokenizer
        self._parser = parser
        self._thoughts = thoughts
        self._forced = forced  # until it was told
        self._call_end = call_end
        self._calls: tuple[ToolCallPart, ...] = ()
        self._ends_with_calls = False

    @property
    def is_ended(self) -> bool:
        return self.finish_reason != _UNFINISHED

    @property
    def num_thought_tokens(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.num_tokens

    def accept(self, output: link_pb2.SequenceOutput) -> pb.Delta | None:
        """What to tell the client of a step's output; None once the choice has ended.

        Run for every token: a message's field is looked at once, since that costs as much as what is done with it.
        """
        token_ids, finish_reason = list(output.token_ids), output.finish_reason
        self.is_worker_done = finish_reason != _UNFINISHED
        if self.finish_reason != _UNFINISHED:
            return None
        self.token_ids += token_ids
        text, thought, num_kept = "", "", len(token_ids)
        if self._detokenizer is not None:
            text, num_kept = self._text(self._detokenizer, token_ids, finish_reason)
            if self._parser is None and finish_reason == _UNFINISHED and self._detokenizer.stop_string is None:
                if self._thoughts is not None:
                    thought, text = self._thoughts.push(token_ids, text)
                return pb.Delta(  # most are so
                    choice=self.index,
                    token_ids=token_ids,
                    text=text,
                    reasoning=thought,
                    logprobs=output.logprobs,
                )
        delta = pb.Delta(choice=self.index, token_ids=token_ids, finish_reason=finish_reason, logprobs=output.logprobs)
        if self._detokenizer is not None:
            if self._detokenizer.stop_string is not None:
                delta.stop_string, delta.finish_reason = self._detokenizer.stop_string, pb.FINISH_REASON_STOP
                del delta.token_ids[num_kept:], delta.logprobs[num_kept:]
            text = self._begun(delta, text)
            if self._thoughts is not None:
                delta.reasoning, text = self._thoughts.push(self._spoken(delta), text)
                if delta.finish_reason != _UNFINISHED:
                    text += self._thoughts.finish()
            delta.text = text if self._parser is None else self._content(delta, self._parser, text)
        if _ends_by_token(delta) and token_ids and token_ids[-1] != self._call_end:
            delta.stop_token_id = token_ids[-1]
        # after `length` more calls might have come, and a call that was cut off is none to run
        if delta.finish_reason == pb.FINISH_REASON_STOP and self._ends_with_calls:
            delta.finish_reason = pb.FINISH_REASON_TOOL_CALLS
        self.finish_reason = delta.finish_reason
        return delta

    def take_calls(self) -> CallsMade | None:
        """The parts of calls that the last `accept` gave, removed from here; None where it gave none."""
        calls, self._calls = self._calls, ()
        return CallsMade(self.index, calls) if calls else None

    def _begun(self, delta: pb.Delta, text: str) -> str:
        """The text with what was forced before it, whose tokens are put into the first delta."""
        if self._forced is None:
            return text
        tokens = [*self._forced.token_ids, *delta.token_ids]
        del delta.token_ids[:]
        delta.token_ids.extend(tokens)
        text, self._forced = self._forced.text + text, None
        return text

    @staticmethod
    def _spoken(delta: pb.Delta) -> Sequence[int]:
        """The tokens that the client is told, but for one that ended the choice by itself."""
        return list(delta.token_ids[:-1] if _ends_by_token(delta) else delta.token_ids)

    def _content(self, delta: pb.Delta, parser: ToolCallParser, text: str) -> str:
        """The part of the text that is for the client to read; parts of calls are kept for `take_calls`."""
        is_last = delta.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if is_last and self._call_end is not None and list(delta.token_ids[-1:]) == [self._call_end]:
            text += CALL_END
        parts = [parser.push(text)]
        if is_last:
            is_cut_off = delta.finish_reason == pb.FINISH_REASON_LENGTH or delta.HasField("stop_string")
            parts.append(parser.finish(is_cut_off=is_cut_off))
            self._ends_with_calls = parser.num_calls > 0 and not parser.is_cut
        self._calls += tuple(call for part in parts for call in part.calls)
        return "".join(part.content for part in parts)

    @staticmethod
    def _text(detokenizer: Detokenizer, token_ids: Sequence[int], finish_reason: pb.FinishReason) -> tuple[str, int]:
        """The step's text and how many of its tokens count: not those after a stop string.

        A stop token gives no text, special or not. Neither does an id that the model has and the tokenizer has not.
        """
        if len(token_ids) == 1 and finish_reason == _UNFINISHED:  # nearly every step
            with suppress(TokenIdError):
                return detokenizer.push_token(token_ids[0]), 1
            return "", 1
        num_tokens, text = len(token_ids), ""
        spoken = token_ids[:-1] if finish_reason == pb.FINISH_REASON_STOP else token_ids
        for index, token in enumerate(spoken):
            with suppress(TokenIdError):
                text += detokenizer.push_token(token)
            if detokenizer.stop_string is not None:
                num_tokens = index + 1
                break
        if finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            text += detokenizer.finish()
        return text, num_tokens


def _ends_by_token(delta: pb.Delta) -> bool:
    return delta.finish_reason == pb.FINISH_REASON_STOP and not delta.HasField("stop_string")


def joined(earlier: pb.Delta, later: pb.Delta) -> pb.Delta:
    """Two deltas of one choice, one after the other, as one. Empties `earlier`."""
    text, thought = earlier.text + later.text, earlier.reasoning + later.reasoning
    earlier.MergeFrom(later)
    earlier.text, earlier.reasoning = text, thought
    return earlier
