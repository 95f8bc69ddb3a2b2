"""The pipeline's events as OpenAI's response objects: whole ones and stream chunks, of chats and of completions.

A chunk's constant part is encoded once per request, and of a choice that goes on with text all but that text.
`stop_reason`, `token_ids` and `prompt_token_ids` are vLLM's additions, `timing` is ours: what gRPC's summary says.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from moonshard.models.tokenizers.tokenizer import Tokenizer
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.codec import decode_finish_reason, decode_stop_reason
from moonshard.rpc.status import RequestError, openai_error
from moonshard.rpc.types import ToolCallPart
from moonshard.serving.gateway.openai.calls import chunk_choices, with_calls
from moonshard.serving.gateway.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from moonshard.serving.gateway.openai.prompts import Prompts
from moonshard.serving.gateway.pipeline.choice import CallsMade, PromptEvent

COMPLETION = "text_completion"
DONE = b"data: [DONE]\n\n"
FINGERPRINT_CHARS = 12
PADDED_BYTES = 64  # a padded chunk's length is a multiple of this, but for what ends it

_encoder = msgspec.json.Encoder()
_HERE = "a choice's text"  # stands for it where nothing else of a choice is spelled so


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """What every object of one response repeats, and what the client wanted to see."""

    id: str
    model: str
    fingerprint: str
    has_logprobs: bool
    has_token_ids: bool
    has_usage: bool = False  # streams only, as are the next two
    has_running_usage: bool = False  # of every chunk, where there is usage
    is_padded: bool = False  # chunks are filled up, so that their length tells less of their text
    has_timing: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:FINGERPRINT_CHARS]}",
        }


class Format(Protocol):
    """Where chats and completions differ."""

    @property
    def kind(self) -> str: ...

    @property
    def chunk_kind(self) -> str: ...

    def choice(self, delta: pb.Delta, logprobs: dict | None) -> dict[str, object]:
        """A whole choice."""
        ...

    def chunk_choice(self, delta: pb.Delta, logprobs: dict | None) -> dict[str, object]:
        """A chunk's; without text where there is none."""
        ...

    def opening(self, index: int) -> dict[str, object] | None:
        """What a stream says of a choice before the choice's first token."""
        ...

    def offsets(self, start: int) -> TextOffsets:
        """The text offsets of one choice, from its first token on, which begins at `start`."""
        ...

    def logprobs(self, positions: Sequence[pb.PositionLogprobs], offsets: TextOffsets) -> dict: ...


@dataclass(frozen=True, slots=True)
class ChatFormat:
    tokenizer: Tokenizer | None
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def choice(self, delta: pb.Delta, logprobs: dict | None) -> dict[str, object]:
        message = {"role": "assistant", **_reasoning(delta), "content": delta.text, "refusal": None}
        return {"index": delta.choice, "message": message, "logprobs": logprobs, **_finish(delta)}

    def chunk_choice(self, delta: pb.Delta, logprobs: dict | None) -> dict[str, object]:
        said = _reasoning(delta) | ({"content": delta.text} if delta.text else {})
        return {"index": delta.choice, "delta": said, "logprobs": logprobs, **_finish(delta)}

    def opening(self, index: int) -> dict[str, object] | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def offsets(self, start: int) -> TextOffsets:
        return TextOffsets(None)  # chats have none

    def logprobs(self, positions: Sequence[pb.PositionLogprobs], offsets: TextOffsets) -> dict:
        return chat_logprobs(self.tokenizer, positions)


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    tokenizer: Tokenizer | None
    skip_special: bool = True
    kind: str = COMPLETION
    chunk_kind: str = COMPLETION

    def choice(self, delta: pb.Delta, logprobs: dict | None) -> dict[str, object]:
        return {"index": delta.choice, "text": delta.text, "logprobs": logprobs, **_finish(delta)}

    def chunk_choice(self, delta: pb.Delta, logprobs: dict | None) -> dict[str, object]:
        return self.choice(delta, logprobs)

    def opening(self, index: int) -> dict[str, object] | None:
        return None

    def offsets(self, start: int) -> TextOffsets:
        return TextOffsets(self.tokenizer, skip_special=self.skip_special, start=start)

    def logprobs(self, positions: Sequence[pb.PositionLogprobs], offsets: TextOffsets) -> dict:
        return completion_logprobs(self.tokenizer, positions, offsets)


class Whole:
    """Collects the events of one request into one response object."""

    def __init__(self, envelope: Envelope, form: Format, prompts: Prompts | None = None) -> None:
        self._envelope = envelope
        self._form = form
        self._prompts = prompts or Prompts(None)
        self._deltas: dict[int, list[pb.Delta]] = {}
        self._calls: dict[int, list[ToolCallPart]] = {}

    def add(self, event: PromptEvent | CallsMade | pb.Delta, prompt: int = 0) -> None:
        if isinstance(event, pb.TokenIds | pb.PromptLogprobs):
            self._prompts.add(event, prompt)
        elif isinstance(event, CallsMade):
            self._calls.setdefault(event.choice, []).extend(event.calls)
        else:
            self._deltas.setdefault(event.choice, []).append(event)

    def body(self, summary: pb.Summary) -> bytes:
        body = self._envelope.head(self._form.kind)
        body["choices"] = [self._choice(self._deltas[index]) for index in sorted(self._deltas)]
        body["usage"] = whole_usage(summary.usage)
        if self._envelope.has_token_ids and not self._prompts.asked.is_batch:
            body["prompt_token_ids"] = self._prompts.ids()
        if self._prompts.asked.num_prompt_logprobs is not None and self._form.kind != COMPLETION:
            body["prompt_logprobs"] = self._prompts.as_vllm()
        if self._envelope.has_timing:
            body["timing"] = timing_object(summary.timing)
        return _encoder.encode(body)

    def _choice(self, deltas: list[pb.Delta]) -> dict[str, object]:
        whole = pb.Delta(
            text="".join(delta.text for delta in deltas), reasoning="".join(delta.reasoning for delta in deltas)
        )
        for delta in deltas:
            delta.ClearField("text")
            delta.ClearField("reasoning")
            whole.MergeFrom(delta)  # scalars: the last one said; token ids and log-probabilities: joined
        offsets = self._form.offsets(self._prompts.num_chars(whole.choice))
        logprobs = self._form.logprobs(whole.logprobs, offsets) if self._envelope.has_logprobs else None
        choice = with_calls(self._form.choice(whole, logprobs), whole.text, self._calls.get(whole.choice, ()))
        if self._form.kind == COMPLETION:
            choice = self._prompts.with_prompt(choice, logprobs)
        if not self._envelope.has_token_ids:
            return choice
        asked = self._prompts.asked
        own = {"prompt_token_ids": self._prompts.ids(whole.choice // asked.num_choices)} if asked.is_batch else {}
        return choice | {"token_ids": list(whole.token_ids)} | own


class Chunks:
    """Turns the events of one request into server-sent events."""

    def __init__(self, envelope: Envelope, form: Format, prompts: Prompts | None = None) -> None:
        self._envelope = envelope
        self._form = form
        self._prompts = prompts or Prompts(None)
        head = _encoder.encode(envelope.head(form.chunk_kind))
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._first_extra: dict[str, object] = {}
        self._opened: set[int] = set()
        # by choice that goes on, and whether it thinks: what stands around its text
        self._around: dict[tuple[int, bool], tuple[bytes, bytes]] = {}
        self._is_plain = not (envelope.has_token_ids or envelope.has_logprobs)
        self._offsets: dict[int, TextOffsets] = {}
        self._num_prompt = 0
        self._num_tokens = 0  # of all choices, so far

    def set_prompt(self, event: PromptEvent, prompt: int = 0) -> None:
        """Keeps the prompt for the first chunk, where the client asked for it, and for what is echoed."""
        self._prompts.add(event, prompt)
        if isinstance(event, pb.TokenIds):
            self._num_prompt += len(event.ids)
            if self._envelope.has_token_ids and not self._prompts.asked.is_batch:
                self._first_extra = {"prompt_token_ids": list(event.ids)}

    def delta(self, delta: pb.Delta) -> bytes:
        """Empty where the client is told nothing: its text is held back, or is a part of a call."""
        self._num_tokens += len(delta.token_ids)
        opening = self._opening(delta.choice)
        text, thought = delta.text, delta.reasoning
        if self._is_plain and not delta.finish_reason and not (text and thought):  # nearly every token's
            said = text or thought
            return opening + self._said(delta.choice, said, is_thought=bool(thought)) if said else opening
        if not (text or thought or delta.finish_reason or self._envelope.has_token_ids or self._envelope.has_logprobs):
            return opening
        choice = self._form.chunk_choice(delta, self._logprobs(delta))
        if self._envelope.has_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return opening + self._chunk(choice)

    def calls(self, made: CallsMade) -> bytes:
        return self._opening(made.choice) + b"".join(map(self._chunk, chunk_choices(made)))

    def summary(self, summary: pb.Summary) -> bytes:
        """The last chunk; empty where neither usage nor timing was asked for."""
        asked: dict[str, object] = {}
        if self._envelope.has_usage:
            asked["usage"] = whole_usage(summary.usage)
        if self._envelope.has_timing:
            asked["timing"] = timing_object(summary.timing)
        return self._head + b"]," + _encoder.encode(asked)[1:] + b"\n\n" if asked else b""

    def last(self, summary: pb.Summary) -> bytes:
        """The stream's end."""
        return self.summary(summary) + DONE

    def failed(self, error: RequestError) -> bytes:
        """An error after the stream began: the status line is gone."""
        return b"data: " + _encoder.encode(openai_error(error)) + b"\n\n"

    def _said(self, index: int, text: str, *, is_thought: bool) -> bytes:
        """A chunk of a choice that goes on, byte for byte as `_chunk` has it."""
        if (around := self._around.get((index, is_thought))) is None:
            delta = pb.Delta(choice=index, reasoning=_HERE) if is_thought else pb.Delta(choice=index, text=_HERE)
            choice = _encoder.encode(self._form.chunk_choice(delta, None))
            before, _, after = choice.partition(_encoder.encode(_HERE))
            around = self._around[index, is_thought] = before, after
        before, after = around
        return self._finished(self._head + before + _encoder.encode(text) + after)

    def _chunk(self, choice: dict[str, object]) -> bytes:
        return self._finished(self._head + _encoder.encode(choice))

    def _finished(self, chunk: bytes) -> bytes:
        chunk += b"]"
        if extra := self._extra():
            chunk += b"," + _encoder.encode(extra)[1:-1]
        if self._envelope.is_padded:
            chunk += b',"obfuscation":"' + b"x" * (-len(chunk) % PADDED_BYTES) + b'"'
        return chunk + b"}\n\n"

    def _extra(self) -> dict[str, object]:
        """What stands beside a chunk's choice."""
        extra, self._first_extra = self._first_extra, {}
        if not self._envelope.has_usage:
            return extra
        if not self._envelope.has_running_usage:
            return extra | {"usage": None}
        return extra | {"usage": usage_object(self._num_prompt, self._num_tokens)}

    def _opening(self, index: int) -> bytes:
        """What comes before the first chunk of a choice."""
        if index in self._opened:
            return b""
        self._opened.add(index)
        opening = self._form.opening(index) or self._prompts.opening(index)
        return b"" if opening is None else self._chunk(opening)

    def _logprobs(self, delta: pb.Delta) -> dict | None:
        if not self._envelope.has_logprobs:
            return None
        if delta.choice not in self._offsets:
            self._offsets[delta.choice] = self._form.offsets(self._prompts.num_chars(delta.choice))
        return self._form.logprobs(delta.logprobs, self._offsets[delta.choice])


def usage_object(num_prompt: int, num_completion: int) -> dict[str, object]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def whole_usage(usage: pb.Usage) -> dict[str, object]:
    """The usage of a request that has ended, when the number of cached tokens is known too."""
    whole = usage_object(usage.prompt_tokens, usage.completion_tokens)
    whole["prompt_tokens_details"] = cached_object(usage)
    if usage.HasField("reasoning_tokens"):
        whole["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return whole


def cached_object(usage: pb.Usage) -> dict[str, object]:
    """How many tokens of the prompt were cached and, where not all of them were in a device's pages, by tier, under
    SGLang's name.
    """
    cached: dict[str, object] = {"cached_tokens": usage.cached_tokens}
    if by_tier := dict(sorted(usage.cached_by_tier.items())):
        cached["cached_tokens_details"] = {"device": usage.cached_tokens - sum(by_tier.values()), **by_tier}
    return cached


def timing_object(timing: pb.Timing) -> dict[str, object]:
    """Every duration of inference.proto's Timing under its name there, also those that are 0."""
    return {name: getattr(timing, name) for name in pb.Timing.DESCRIPTOR.fields_by_name}


def _reasoning(delta: pb.Delta) -> dict[str, str]:
    """Moonshot's and DeepSeek's field for what the model thought."""
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {}


def _finish(delta: pb.Delta) -> dict[str, object]:
    return {"finish_reason": decode_finish_reason(delta.finish_reason), "stop_reason": decode_stop_reason(delta)}
