"""Bodies of OpenAI's requests, and what they mean here.

Every parameter that is known is served, or refused by name: none is ignored. One that is not served is still accepted
at the values that ask for nothing (`NO_OPS`), since clients send those; so is null, of any. What is unknown is not in
these structs (`unknown`). Integers may be written as 3.0. Bounds are checked later; types and shapes, here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.constrained.parts import Part
from moonshard.serving.control.sampling_parameters import PARAMETERS
from moonshard.serving.gateway.forms import not_together
from moonshard.serving.gateway.openai.body import ABSENT, is_nothing, whole, whole_list
from moonshard.serving.gateway.openai.completion_prompts import completion_prompts, most_asked
from moonshard.serving.gateway.openai.formats import FormBody, asked_form
from moonshard.serving.gateway.openai.messages import Message, chat_messages, check_text_of_assistant, goes_on
from moonshard.serving.gateway.openai.prompts import Asked
from moonshard.serving.gateway.openai.sampling import Number
from moonshard.serving.gateway.openai.thinking import ThinkingBody, asked_thinking
from moonshard.serving.gateway.openai.tools import Tool, offer
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt, ToolUse

# Parameters of OpenAI, Moonshot, vLLM, SGLang and llama.cpp that are not served, with the values beside null that ask
# for nothing.
NO_OPS: Mapping[str, Sequence[object]] = {
    "add_special_tokens": (True, False),  # this tokenizer adds none of its own
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n_predict": (-1,),
    "n_probs": (0,),
    "prediction": (),
    "prompt_embeds": (),
    "repeat_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "xtc_probability": (0,),
}
CHAT_NO_OPS: Mapping[str, Sequence[object]] = {"echo": (False,)}  # served in completions
# Served in chats.
COMPLETION_NO_OPS: Mapping[str, Sequence[object]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "enable_thinking": (False,),
    "parallel_tool_calls": (True, False),
    "thinking": (False, {"type": "disabled"}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
INTEGERS = (
    *(each.name for each in PARAMETERS if each.is_integer),
    *("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "top_logprobs"),
    *("prompt_logprobs", "priority"),
)

_CHAT_SPELLING: Mapping[str, str] = {"prompt": "messages", "template_kwargs": "chat_template_kwargs"}
COMPLETION_TOKENS = 16  # OpenAI's default for completions, where the context has room for them


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: of every chunk, where there is usage at all
    include_obfuscation: bool | None = None


NO_STREAM_OPTIONS = StreamOptions()


class GenerationBody(FormBody, kw_only=True):
    """What both completion routes take beside the table's sampling parameters and the answer's form."""

    model: str | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: Number | None = None
    min_tokens: Number | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Number] | None = None
    ignore_eos: bool | None = None
    n: Number | None = None
    prompt_logprobs: Number | None = None  # vLLM's
    best_of: Number | None = None
    priority: Number | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_timing: bool | None = None
    skip_special_tokens: bool | None = None
    request_id: str | None = None
    prompt_cache_key: str | None = None
    # what asks for nothing here, whatever it says: nothing is stored, and there is one tier
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    metadata: msgspec.Raw = ABSENT
    service_tier: str | None = None
    reasoning_effort: str | None = None  # of completions; in chats it is served
    prompt_cache_retention: str | None = None
    add_special_tokens: msgspec.Raw = ABSENT
    allowed_token_ids: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    bad_words: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    dry_multiplier: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    guided_decoding_backend: msgspec.Raw = ABSENT
    guided_whitespace_pattern: msgspec.Raw = ABSENT
    include_stop_str_in_output: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    length_penalty: msgspec.Raw = ABSENT
    logits_processors: msgspec.Raw = ABSENT
    lora_path: msgspec.Raw = ABSENT
    mirostat: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT
    n_predict: msgspec.Raw = ABSENT
    n_probs: msgspec.Raw = ABSENT
    prediction: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT
    repeat_penalty: msgspec.Raw = ABSENT
    return_tokens_as_token_ids: msgspec.Raw = ABSENT
    spaces_between_special_tokens: msgspec.Raw = ABSENT
    structural_tag: msgspec.Raw = ABSENT
    suffix: msgspec.Raw = ABSENT
    truncate_prompt_tokens: msgspec.Raw = ABSENT
    typical_p: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    verbosity: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT
    xtc_probability: msgspec.Raw = ABSENT

    @property
    def streaming(self) -> StreamOptions:
        return self.stream_options or NO_STREAM_OPTIONS


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    echo: msgspec.Raw = ABSENT
    chat_template_kwargs: dict[str, object] | None = None
    thinking: bool | ThinkingBody | None = None
    enable_thinking: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # vLLM's way to say that the last message is `partial`


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[Number | str | list[Number]]
    logprobs: Number | None = None
    echo: bool | None = None
    add_generation_prompt: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    enable_thinking: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: msgspec.Raw = ABSENT


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None  # this tokenizer adds none of its own: either value asks for the same
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    thinking: bool | ThinkingBody | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Number]


def chat_request(body: ChatBody, *, request_id: str, received_ns: int) -> GenerationRequest:
    """InvalidArgument where the body asks for what is not served."""
    spelling = {**_CHAT_SPELLING, "num_logprobs": "top_logprobs", "num_prompt_logprobs": "prompt_logprobs"}
    _refuse_unserved(body, {**NO_OPS, **CHAT_NO_OPS})
    said = _integers(body)
    if "max_completion_tokens" in said:
        spelling["max_tokens"] = "max_completion_tokens"
        said["max_tokens"] = said["max_completion_tokens"]
    if said.get("top_logprobs") and not body.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
    offered, form = offer(body.tools, body.tool_choice, body.parallel_tool_calls), asked_form(body)
    if form is not None and (offered.is_required or offered.forced is not None):
        raise not_together(form.field, "tool_choice")
    return _request(
        body,
        _chat_prompt(body, body.messages, offered.tools),
        said,
        said.get("top_logprobs", 0) if body.logprobs else None,
        said.get("prompt_logprobs"),
        form=form,
        tool_use=offered.use(body.messages),
        spelling=spelling,
        request_id=request_id,
        received_ns=received_ns,
    )


def completion_requests(body: CompletionBody, *, request_id: str, received_ns: int) -> Sequence[GenerationRequest]:
    """A request for each prompt. InvalidArgument where the body asks for what is not served."""
    _refuse_unserved(body, {**NO_OPS, **COMPLETION_NO_OPS})
    said, prompts = _integers(body), completion_prompts(body.prompt)
    num_logprobs = None if body.logprobs is None else whole("logprobs", body.logprobs)
    if len(prompts) > 1 and body.return_timing:
        raise InvalidArgument("return_timing: not of several prompts at once", field="return_timing")
    wants_prompt = bool(body.echo) or "prompt_logprobs" in said
    is_answered = not (wants_prompt and said.get("max_tokens") == 0)
    whole_request = _request(
        body,
        next(iter(prompts.values())),
        said if is_answered else {**said, "max_tokens": 1},
        num_logprobs,
        most_asked(num_logprobs if body.echo else None, said.get("prompt_logprobs")),
        form=asked_form(body),
        spelling={
            "num_logprobs": "logprobs",
            "num_prompt_logprobs": "logprobs" if "prompt_logprobs" not in said else "prompt_logprobs",
        },
        request_id=request_id,
        received_ns=received_ns,
    )
    whole_request = replace(whole_request, is_answered=is_answered)
    if len(prompts) == 1:
        return (whole_request,)
    return tuple(
        replace(
            whole_request,
            prompt=prompt,
            request_id=f"{whole_request.request_id}-{index}",
            spelling={**whole_request.spelling, "prompt": name},
        )
        for index, (name, prompt) in enumerate(prompts.items())
    )


def asked_of_prompts(body: CompletionBody, request: GenerationRequest, num_prompts: int) -> Asked:
    """What the answer shows of the prompts. `request`: that of any of them."""
    return Asked(
        is_echoed=bool(body.echo),
        num_echoed_logprobs=request.num_logprobs if body.echo else None,
        num_prompt_logprobs=_integers(body).get("prompt_logprobs"),
        num_prompts=num_prompts,
        num_choices=request.n,
    )


def request_to_tokenize(body: TokenizeBody) -> GenerationRequest:
    """A text, or what a chat with these messages would prefill.

    InvalidArgument for neither or both, and as `chat_request`.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("give either prompt or messages", field="prompt")
    if body.messages is None:
        return GenerationRequest(request_id="", received_ns=0, prompt=TextPrompt(body.prompt or ""))
    return _chat_to_tokenize(body, body.messages)


def ids_to_detokenize(body: DetokenizeBody) -> Sequence[int]:
    """InvalidArgument at one that is no integer."""
    return whole_list("tokens", body.tokens)


def _chat_to_tokenize(body: TokenizeBody, messages: Sequence[Message]) -> GenerationRequest:
    offered = offer(body.tools)
    return GenerationRequest(
        request_id="",
        received_ns=0,
        prompt=_chat_prompt(body, messages, offered.tools),
        tool_use=offered.use(messages),
        spelling=_CHAT_SPELLING,
    )


def _chat_prompt(body: ChatBody | TokenizeBody, messages: Sequence[Message], tools: Sequence[Tool]) -> ChatPrompt:
    """InvalidArgument for what is no text, for tools that come twice, and for a message that cannot be gone on with."""
    kwargs = dict(body.chat_template_kwargs or {})
    if tools and "tools" in kwargs:
        name = "chat_template_kwargs.tools"
        raise InvalidArgument(f"{name}: there are tools in the request already", field=name)
    kwargs |= {"tools": list(tools)} if tools else {}
    return ChatPrompt(
        chat_messages(messages),
        kwargs,
        body.add_generation_prompt is not False,
        _is_continued(body, messages),
        asked_thinking(body.thinking, body.enable_thinking, body.reasoning_effort),
    )


def _is_continued(body: ChatBody | TokenizeBody, messages: Sequence[Message]) -> bool:
    """Whether the answer is the rest of the last message, which that message says or the body."""
    name = "continue_final_message"
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidArgument(f"{name}: not together with add_generation_prompt", field=name)
    return goes_on(messages) or bool(body.continue_final_message and check_text_of_assistant(messages, name))


def _request(
    body: GenerationBody,
    prompt: ChatPrompt | TextPrompt | TokenPrompt,
    integers: Mapping[str, int],
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    *,
    form: Part | None,
    tool_use: ToolUse | None = None,
    spelling: Mapping[str, str],
    request_id: str,
    received_ns: int,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=body.request_id or request_id,
        received_ns=received_ns,
        prompt=prompt,
        model=body.model or "",
        sampling=_sampling(body, integers),
        logit_bias=body.logit_bias or {},
        max_tokens=integers.get("max_tokens"),
        default_max_tokens=COMPLETION_TOKENS if isinstance(body, CompletionBody) else None,
        min_tokens=integers.get("min_tokens", 0),
        stop=_strings(body.stop),
        stop_token_ids=whole_list("stop_token_ids", body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        n=integers.get("n", 1),
        num_logprobs=num_logprobs,
        priority=integers.get("priority", 0),
        num_prompt_logprobs=num_prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        tool_use=tool_use,
        form=form,
        spelling=spelling,
    )


def _sampling(body: GenerationBody, integers: Mapping[str, int]) -> dict[str, float]:
    """The sampling parameters that the client gave."""
    given = ((each.name, integers.get(each.name, getattr(body, each.name))) for each in PARAMETERS)
    return {name: value for name, value in given if value is not None}


def _integers(body: GenerationBody) -> dict[str, int]:
    """Those that the client gave. InvalidArgument at a fraction."""
    given = ((name, getattr(body, name, None)) for name in INTEGERS)
    return {name: whole(name, value) for name, value in given if value is not None}


def _refuse_unserved(body: GenerationBody, no_ops: Mapping[str, Sequence[object]]) -> None:
    for name, accepted in no_ops.items():
        if not is_nothing(getattr(body, name), accepted):
            raise InvalidArgument(f"{name} is not supported", field=name)
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise InvalidArgument("best_of is supported only where it equals n", field="best_of")
    if body.streaming.include_usage and not body.stream:
        raise InvalidArgument("stream_options needs stream: true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidArgument("prompt_logprobs: not with stream: true", field="prompt_logprobs")


def _strings(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []
