"""What a client asked for, whichever front it came through, and the checks on it.

Both fronts build a `GenerationRequest`; `check_parameters` is the one place that says what is valid, for sampling by
the table of its parameters. What depends on the number of prompt tokens is `generation`'s.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moonshard.models.folder.generation import GenerationDefaults
from moonshard.rpc.status import ContextLengthExceeded, InvalidArgument
from moonshard.serving.constrained.parts import Part
from moonshard.serving.control.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_TOKENS,
)
from moonshard.serving.control.sampling_parameters import PARAMETERS, Range
from moonshard.serving.gateway.caller import Caller
from moonshard.serving.observe.spans.context import TraceContext

MAX_STOP_STRINGS = 16
MAX_GIVEN_STOP_TOKENS = 16 * MAX_STOP_TOKENS  # with those that come twice; which are left is counted after that
MAX_STOP_CHARS = 1_000  # of one: each choice prepares its matchers on the event loop
MAX_REQUEST_ID_CHARS = 512  # every chunk of a stream repeats it; the header's 256 have a prefix put before them
EFFORTS_WITHOUT_THOUGHTS = ("none", "minimal")
MAX_UNPACKED_IDS = 1 << 10  # fewer are not worth packing


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> "TokenPrompt":
        """Many are packed: as Python's numbers they would take nine times as much for as long as the answer lasts."""
        if len(token_ids) <= MAX_UNPACKED_IDS:
            return cls(tuple(token_ids))
        try:
            return cls(array("I", token_ids))
        except OverflowError:  # one is negative or beyond 32 bits: `check_token_ids` refuses it by name
            return cls(tuple(token_ids))


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the client asked of the model's thinking, by which field; None: nothing. `is_kept`: of earlier turns."""

    is_on: bool | None = None
    effort: str | None = None
    is_kept: bool = False
    field: str = ""

    @classmethod
    def by_effort(cls, effort: str | None) -> "Thinking":
        """OpenAI's efforts without thoughts switch thinking off, all others on: these models have one."""
        if effort is None:
            return cls()
        return cls(effort not in EFFORTS_WITHOUT_THOUGHTS, effort=effort, field="reasoning_effort")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, object]]
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    is_continued: bool = False  # the answer is the rest of the last message
    thinking: Thinking = field(default_factory=Thinking)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """The functions that the answer may call; `call_ids`: of the conversation's calls so far."""

    functions: frozenset[str]
    call_ids: frozenset[str] = frozenset()
    forced: str | None = None  # the function that the answer begins by calling
    max_calls: int | None = None  # None: as many as the model makes
    is_required: bool = False  # the answer is calls and nothing else
    arguments: Mapping[str, Part] = field(default_factory=dict)  # of functions whose schema is to be kept to

    @classmethod
    def of(
        cls,
        functions: frozenset[str],
        call_ids: Iterable[str],
        *,
        forced: str | None,
        is_single: bool,
        is_required: bool = False,
        arguments: Mapping[str, Part] | None = None,
    ) -> "ToolUse | None":
        """None without functions: nothing is looked for in the answer then. One that is forced is the only call."""
        if not functions:
            return None
        max_calls = 1 if forced is not None or is_single else None
        return cls(
            functions=functions,
            call_ids=frozenset(call_ids),
            forced=forced,
            max_calls=max_calls,
            is_required=is_required,
            arguments=arguments or {},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A request as the client put it; None: not said. `spelling` maps names used here to the client's, for errors."""

    request_id: str
    received_ns: int  # perf_counter_ns
    prompt: TextPrompt | TokenPrompt | ChatPrompt
    model: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)  # by name, those of `PARAMETERS` that were said
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    default_max_tokens: int | None = None  # where the client said nothing: at most so many, if they fit
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    num_logprobs: int | None = None
    priority: int = 0  # lower is served first
    is_background: bool = False  # nobody waits for the answer: it comes behind all others, whatever its priority
    num_prompt_logprobs: int | None = None
    is_answered: bool = True  # else the prompt is all that is wanted: `max_tokens` is 1, and that token nobody's
    skip_special_tokens: bool = True
    tool_use: ToolUse | None = None  # None: calls in the answer are not looked for
    form: Part | None = None  # that the answer keeps to, where it is no call
    caller: Caller = field(default_factory=Caller)
    parent: TraceContext | None = None  # the client's span, where spans are wanted
    spelling: Mapping[str, str] = field(default_factory=dict)

    def invalid(self, name: str, problem: str) -> InvalidArgument:
        """The error for one parameter, under the name the client knows it by."""
        spelt = self._spelt(name)
        return InvalidArgument(f"{spelt}: {problem}", field=spelt)

    def too_long(self, name: str, context_tokens: int, excess: str) -> ContextLengthExceeded:
        """The same for one that the context has no room for. `{}` in `excess` is its name."""
        spelt = self._spelt(name)
        return ContextLengthExceeded.of(context_tokens, excess.format(spelt), field=spelt)

    def _spelt(self, name: str) -> str:
        """As the client knows it: the name, or the longest of those that it stands within."""
        known = [each for each in self.spelling if name == each or name.startswith((f"{each}.", f"{each}["))]
        within = max(known, key=len, default="")
        return self.spelling[within] + name.removeprefix(within) if within else name


_RANGES = {
    "n": Range(1, MAX_CHOICES),
    "max_tokens": Range(1, 2**32 - 1),
    "min_tokens": Range(0, 2**32 - 1),
    "num_logprobs": Range(0, MAX_LOGPROBS),
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY),
    "num_prompt_logprobs": Range(0, MAX_LOGPROBS),
}


def check_parameters(request: GenerationRequest, *, vocab_size: int, has_tokenizer: bool) -> None:
    """InvalidArgument naming the first parameter that cannot be served."""
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise request.invalid("request_id", f"at most {MAX_REQUEST_ID_CHARS} characters, not {len(request.request_id)}")
    for parameter in PARAMETERS:
        _check_range(request, parameter.name, request.sampling.get(parameter.name), parameter.bounds)
    for name, bounds in _RANGES.items():
        _check_range(request, name, getattr(request, name), bounds)
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise request.invalid("min_tokens", f"{request.min_tokens} exceeds max_tokens ({request.max_tokens})")
    _check_bias(request, vocab_size)
    if len(request.stop_token_ids) > MAX_GIVEN_STOP_TOKENS:
        raise request.invalid("stop_token_ids", f"at most {MAX_STOP_TOKENS} tokens, not {len(request.stop_token_ids)}")
    check_token_ids(request, "stop_token_ids", request.stop_token_ids, vocab_size)
    _check_stop_strings(request, has_tokenizer)


def _check_range(request: GenerationRequest, name: str, value: float | None, bounds: Range) -> None:
    if value is not None and value not in bounds:
        raise request.invalid(name, f"must be {bounds}, not {value}")


def check_token_ids(request: GenerationRequest, name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        offender = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise request.invalid(name, f"token id {offender} is outside the vocabulary of {vocab_size} tokens")


def check_prompt_logprobs(request: GenerationRequest, num_prompt: int) -> None:
    """InvalidArgument where the log-probabilities of so many tokens are too many for one answer."""
    if request.num_prompt_logprobs is None:
        return
    num_all = num_prompt * (1 + request.num_prompt_logprobs)
    if num_all > MAX_PROMPT_LOGPROBS:
        problem = f"{num_all} log-probabilities of {num_prompt} tokens, at most {MAX_PROMPT_LOGPROBS} are told"
        raise request.invalid("num_prompt_logprobs", problem)


def stop_tokens(
    request: GenerationRequest, defaults: GenerationDefaults, vocab_size: int, *, call_end: int | None = None
) -> list[int]:
    """The token ids that end a choice, ascending: the folder's own, unless `ignore_eos`, and the request's.

    `call_end`: the one after a single call.
    """
    of_folder = () if request.ignore_eos else (token for token in defaults.stop_token_ids if token < vocab_size)
    of_call = () if call_end is None else (call_end,)
    tokens = sorted({*of_folder, *of_call, *request.stop_token_ids})
    if len(tokens) > MAX_STOP_TOKENS:
        raise request.invalid(
            "stop_token_ids", f"at most {MAX_STOP_TOKENS} with the model's own end tokens, not {len(tokens)}"
        )
    return tokens


def _check_bias(request: GenerationRequest, vocab_size: int) -> None:
    if len(request.logit_bias) > MAX_LOGIT_BIAS:
        raise request.invalid("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens, not {len(request.logit_bias)}")
    check_token_ids(request, "logit_bias", list(request.logit_bias), vocab_size)
    for token, bias in request.logit_bias.items():
        if not -100 <= bias <= 100:
            raise request.invalid("logit_bias", f"must be at least -100 and at most 100, not {bias} for token {token}")


def _check_stop_strings(request: GenerationRequest, has_tokenizer: bool) -> None:
    if not request.stop:
        return
    if len(request.stop) > MAX_STOP_STRINGS:
        raise request.invalid("stop", f"at most {MAX_STOP_STRINGS} strings, not {len(request.stop)}")
    if (longest := max(map(len, request.stop))) > MAX_STOP_CHARS:
        raise request.invalid("stop", f"at most {MAX_STOP_CHARS} characters in a string, not {longest}")
    if not all(request.stop):
        raise request.invalid("stop", "a stop string is empty")
    if not has_tokenizer:
        raise request.invalid("stop", "the model has no tokenizer: use stop_token_ids")
