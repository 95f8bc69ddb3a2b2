"""What a caller of the public API gives and gets: plain frozen values, no protobuf.

They hold no channel, so that a notebook can keep, compare and print results. What only crosses between gateway and
worker is not here but in link.proto. The meaning of each field is said once, in inference.proto.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

ChatMessage = Mapping[str, object]  # role, content; tool_calls, tool_call_id, name, reasoning, partial
Prompt = str | Sequence[int] | Sequence[ChatMessage]  # text, token ids, or a chat
FinishReason = Literal["stop", "length", "tool_calls"]


class StructuredOutputs(TypedDict, total=False):
    """What the answer keeps to: one of these."""

    json_schema: Mapping[str, object] | str
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str


class GenerateOptions(TypedDict, total=False):
    """How to continue a prompt. What is left out, or None, takes the model folder's default."""

    model: str
    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    logprobs: int | None  # None: none; 0: the chosen token's only; k: also the k most likely
    prompt_logprobs: int | None  # likewise of the prompt's tokens
    request_id: str
    tools: Sequence[Mapping[str, str | bool]]  # of a chat: name, description, parameters (as text), strict
    template_kwargs: Mapping[str, object]  # of a chat: variables of its template, such as thinking
    reasoning_effort: str  # of a chat: "none" and "minimal" switch thinking off, any other value on
    forced_function: str
    single_tool_call: bool
    require_tool_call: bool
    structured_outputs: StructuredOutputs
    priority: int  # lower is served first; 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionLogprobs:
    """Log-probabilities under the model's raw distribution at one generated position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()  # most likely first


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallPart:
    """A part of one tool call: the first part has id and name, later ones have more of the arguments."""

    index: int = 0
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A whole tool call, as a chat's later messages may have it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What one engine step added to one choice."""

    choice: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None  # set on a choice's last delta
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    tool_calls: tuple[ToolCallPart, ...] = ()
    reasoning: str = ""  # what the model thought, before its text and no part of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None  # of the completion; None where thoughts are not told from the rest
    cached_by_tier: Mapping[str, int] = field(default_factory=dict, hash=False)  # of these, from tiers below a device


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Where the time of one request went: durations on the gateway's clock, and the worker's inside them."""

    e2e_ms: float
    ttft_ms: float
    gateway_queue_ms: float
    first_token_ms: float
    decode_ms: float
    finish_ms: float
    worker_queue_ms: float
    worker_prefill_ms: float
    worker_decode_ms: float
    wire_ms: float
    lost_ms: float = 0.0  # of first_token_ms, what attempts took that were lost before it
    # Of a request whose KV moved from a prefill to a decode worker; 0 otherwise. They lie inside the phases.
    decode_queue_ms: float = 0.0
    handoff_gap_ms: float = 0.0
    transfer_ms: float = 0.0
    exposed_transfer_ms: float = 0.0
    land_ms: float = 0.0
    join_ms: float = 0.0
    num_retries: int = 0  # how often the request went on on another worker
    num_outputs: int = 0  # of workers, over all choices: one for each token where nothing guesses

    def phases(self) -> dict[str, float]:
        """The phases in the order they happen. They partition the request: their sum is `e2e_ms`."""
        return {
            "gateway_queue_ms": self.gateway_queue_ms,
            "first_token_ms": self.first_token_ms,
            "decode_ms": self.decode_ms,
            "finish_ms": self.finish_ms,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What is known of a request once it has ended."""

    request_id: str
    model: str
    seed: int
    usage: Usage
    timing: Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A whole answer."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    summary: Summary
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()  # where asked for: of each token, None of the first

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def usage(self) -> Usage:
        return self.summary.usage

    @property
    def timing(self) -> Timing:
        return self.summary.timing


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    model: str
    max_context_tokens: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    has_tokenizer: bool
    dtype: str
    fingerprint: str
    version: str
