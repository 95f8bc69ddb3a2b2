"""Bodies of OpenAI's requests, and what they mean here.

Every parameter is accepted, or refused by name: none is ignored. A parameter that is not served is still accepted at
the values that ask for nothing (`NO_OPS`), since clients send those. Bounds are checked later; types and shapes, here.
"""

from collections.abc import Mapping, Sequence

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.openai_messages import Message, chat_messages
from moonshard.serving.gateway.openai_tools import Tool, offer
from moonshard.serving.gateway.parameters import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt, ToolUse

# Parameters of OpenAI and vLLM that are not served, with the values that ask for nothing.
NO_OPS: Mapping[str, Sequence[object]] = {
    "audio": (None,),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}
# Served in chats.
COMPLETION_NO_OPS: Mapping[str, Sequence[object]] = {
    "parallel_tool_calls": (None, True, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both completion routes take."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_timing: bool | None = None
    skip_special_tokens: bool = True
    request_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    audio: object = None
    echo: object = None
    function_call: object = None
    functions: object = None
    include_stop_str_in_output: object = None
    length_penalty: object = None
    metadata: object = None
    modalities: object = None
    prediction: object = None
    prompt_logprobs: object = None
    reasoning_effort: object = None
    response_format: object = None
    service_tier: object = None
    store: object = None
    suffix: object = None
    use_beam_search: object = None
    verbosity: object = None
    web_search_options: object = None

    @property
    def is_usage_streamed(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[Tool] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: object = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True  # this tokenizer adds none of its own: either value asks for the same
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    tokens: list[int]


def chat_request(body: ChatBody, *, request_id: str, received_ns: int) -> GenerationRequest:
    """InvalidArgument where the body asks for what is not served."""
    spelling = {"prompt": "messages", "num_logprobs": "top_logprobs"}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        spelling["max_tokens"] = "max_completion_tokens"
        max_tokens = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _refuse_unserved(body, NO_OPS)
    offered = offer(body.tools, body.tool_choice, body.parallel_tool_calls)
    return _request(
        body,
        _chat_prompt(body.messages, offered.tools, body.chat_template_kwargs),
        max_tokens,
        num_logprobs,
        tool_use=offered.use(body.messages),
        spelling=spelling,
        request_id=request_id,
        received_ns=received_ns,
    )


def completion_request(body: CompletionBody, *, request_id: str, received_ns: int) -> GenerationRequest:
    """InvalidArgument where the body asks for what is not served."""
    spelling = {"num_logprobs": "logprobs"}
    _refuse_unserved(body, {**NO_OPS, **COMPLETION_NO_OPS})
    max_tokens = 16 if body.max_tokens is None else body.max_tokens  # OpenAI's default on this route
    return _request(
        body,
        _completion_prompt(body.prompt),
        max_tokens,
        body.logprobs,
        spelling=spelling,
        request_id=request_id,
        received_ns=received_ns,
    )


def chat_to_tokenize(body: TokenizeBody, messages: Sequence[Message]) -> GenerationRequest:
    """What a chat with these messages would prefill. InvalidArgument as there."""
    offered = offer(body.tools)
    return GenerationRequest(
        request_id="",
        received_ns=0,
        prompt=_chat_prompt(
            messages, offered.tools, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt
        ),
        tool_use=offered.use(messages),
        spelling={"prompt": "messages"},
    )


def _chat_prompt(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    template_kwargs: Mapping[str, object] | None,
    *,
    add_generation_prompt: bool = True,
) -> ChatPrompt:
    """InvalidArgument for what is no text, and for tools that come twice."""
    kwargs = dict(template_kwargs or {})
    if tools and "tools" in kwargs:
        name = "chat_template_kwargs.tools"
        raise InvalidArgument(f"{name}: there are tools in the request already", field=name)
    kwargs |= {"tools": list(tools)} if tools else {}
    return ChatPrompt(chat_messages(messages), kwargs, add_generation_prompt)


def _request(
    body: GenerationBody,
    prompt: ChatPrompt | TextPrompt | TokenPrompt,
    max_tokens: int | None,
    num_logprobs: int | None,
    *,
    tool_use: ToolUse | None = None,
    spelling: Mapping[str, str],
    request_id: str,
    received_ns: int,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=body.request_id or request_id,
        received_ns=received_ns,
        prompt=prompt,
        model=body.model,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=_strings(body.stop),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=body.ignore_eos,
        n=1 if body.n is None else body.n,
        num_logprobs=num_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        tool_use=tool_use,
        spelling=spelling,
    )


def _refuse_unserved(body: GenerationBody, no_ops: Mapping[str, Sequence[object]]) -> None:
    for name, accepted in no_ops.items():
        if not any(_is_same(getattr(body, name), value) for value in accepted):
            raise InvalidArgument(f"{name} is not supported", field=name)
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise InvalidArgument("best_of is supported only where it equals n", field="best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options needs stream: true", field="stream_options")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        name = "stream_options.continuous_usage_stats"
        raise InvalidArgument(f"{name} is not supported", field=name)


def _is_same(value: object, other: object) -> bool:
    """Equality as JSON has it, where 1 is not true and 0 not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _completion_prompt(prompt: str | list[int | str | list[int]]) -> TextPrompt | TokenPrompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if len(prompt) == 1 and not isinstance(only := prompt[0], int):
        return _completion_prompt(list(only) if isinstance(only, list) else only)  # a batch of one
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) < len(prompt):
        raise InvalidArgument("several prompts in one request are not supported: send one request each", field="prompt")
    return TokenPrompt(token_ids)


def _strings(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []
