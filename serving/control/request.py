"""The nouns of the control plane: what a request asks, and what a step gives back.

Pure: no jax, no grpc, no clock. Everything here is immutable, so that a plan made from it stays true while a step is in
flight. Text never appears: the gateway tokenises before and detokenises after. What is made or hashed for every token
is a named tuple: a frozen dataclass takes several times as long.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from moonshard.serving.control.sampling_parameters import Sampling

MAX_STOP_TOKENS = 16  # per request, the folder's own end tokens included: rows of a static device array
MAX_LOGIT_BIAS = 300  # per request, OpenAI's limit: likewise
MAX_CHOICES = 128  # per request
MAX_LOGPROBS = 20  # most likely alternatives per position
MAX_PRIORITY = 2**31 - 1  # that a client may give, and as far below 0
BACKGROUND = 2**32  # added to the priority of what nobody waits for: it comes behind all that clients ask for
MAX_PROMPT_LOGPROBS = 1 << 18  # numbers of one request: they are sent, and written as JSON, in one piece


class FinishReason(enum.Enum):
    """Why a sequence ended. Cancelled and failed sequences end with an error instead."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt and how to continue it, `n` times."""

    id: bytes  # 16 random bytes
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()
    max_tokens: int
    min_tokens: int = 0  # stop tokens cannot be drawn before
    n: int = 1
    num_logprobs: int | None = None  # None: no log-probabilities at all; 0: the chosen token's only
    priority: int = 0  # lower is served first, as vLLM has it; of equals the oldest
    num_prompt_logprobs: int | None = None  # likewise of the prompt's tokens; the whole prompt is then computed
    grammar: str = ""  # that every choice keeps to, as `serving.constrained` has it; empty: none
    prefix_root: bytes = b""  # what blocks of KV depend on besides tokens, as `kv.prefix.root_name` makes it
    block_names: tuple[bytes, ...] = ()  # of the prompt's full blocks, from the first on, as far as they are known


class SequenceId(NamedTuple):
    """One choice of one request."""

    request_id: bytes
    choice: int


@dataclass(frozen=True, slots=True)
class SlotId:
    """A row of the decode batch. `index` counts within the partition."""

    partition: int
    index: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one generated position under the model's raw distribution."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), most likely first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens but its first, under the model's raw distribution.

    Columns of the same positions; each has equally many `top`, position after position, the most likely first.
    """

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # 1 for the likeliest token of the vocabulary
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Output(NamedTuple):
    """What one step gave one sequence. The last output of a sequence carries its finish reason."""

    sequence: SequenceId
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish: FinishReason | None = None
    num_cached_tokens: int = 0  # of the prompt: known when the sequence was admitted; 0 in all outputs but its first
    prompt_logprobs: PromptLogprobs | None = None  # where asked for: in the first output of the first choice
    guesses: tuple[int, ...] = ()  # in a sequence's first output: what a draft model takes to follow
