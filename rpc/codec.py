"""The public API's values as protobuf messages and back.

Both clients share it, so that they differ in nothing but `await`. It decides nothing about a value: whether a top_p of
2 makes sense is the gateway's to say; only what a message cannot hold at all is refused here.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields

from google.protobuf.message import Message

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import InternalError, InvalidArgument
from moonshard.rpc.types import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    GenerateOptions,
    ModelInfo,
    PositionLogprobs,
    Prompt,
    Summary,
    Timing,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    Usage,
)

_REQUEST_OPTIONS = frozenset(
    {
        "model",
        "n",
        "logprobs",
        "prompt_logprobs",
        "request_id",
        "forced_function",
        "single_tool_call",
        "require_tool_call",
        "priority",
    }
)
_CHAT_OPTIONS = frozenset({"tools", "template_kwargs", "reasoning_effort"})
_FINISH_REASONS: dict[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def encode_generate(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises InvalidArgument naming the option whose value a message cannot hold, TypeError for an unknown option."""
    request = pb.GenerateRequest()
    _merge_prompt(request, prompt)
    for name, value in options.items():
        if value is None:
            continue
        if name == "stop" and isinstance(value, str):
            value = (value,)  # a lone string would pass as a sequence of its characters
        if name in _CHAT_OPTIONS:
            _merge_chat(request, name, value)
            continue
        if name == "structured_outputs":
            _merge_constraint(request, value)
            continue
        _merge(_holder(request, name), name, value)
    return request


def encode_tokenize(prompt: Prompt, model: str) -> pb.TokenizeRequest:
    """Raises InvalidArgument for a prompt that is tokens already."""
    request = pb.TokenizeRequest(model=model)
    _merge_prompt(request, prompt)
    return request


def decode_delta(delta: pb.Delta) -> Delta:
    return Delta(
        choice=delta.choice,
        token_ids=tuple(delta.token_ids),
        text=delta.text,
        logprobs=tuple(map(_decode_position, delta.logprobs)),
        finish_reason=decode_finish_reason(delta.finish_reason),
        stop_reason=decode_stop_reason(delta),
        tool_calls=tuple(
            ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
            for part in delta.tool_calls
        ),
        reasoning=delta.reasoning,
    )


def decode_summary(summary: pb.Summary) -> Summary:
    return Summary(
        request_id=summary.request_id,
        model=summary.model,
        seed=summary.seed,
        usage=_decode_usage(summary.usage),
        timing=Timing(**{field.name: getattr(summary.timing, field.name) for field in fields(Timing)}),
    )


def decode_model_info(info: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        model=info.model,
        max_context_tokens=info.max_context_tokens,
        vocab_size=info.vocab_size,
        stop_token_ids=tuple(info.stop_token_ids),
        has_tokenizer=info.has_tokenizer,
        dtype=info.dtype,
        fingerprint=info.fingerprint,
        version=info.version,
    )


def _decode_usage(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens if usage.HasField("reasoning_tokens") else None,
        cached_by_tier=dict(usage.cached_by_tier),
    )


def decode_prompt_logprobs(
    prompt_token_ids: tuple[int, ...], found: pb.PromptLogprobs
) -> tuple[PositionLogprobs | None, ...]:
    """One for each token of the prompt: None for the first, of which nothing is known."""
    num_top = len(found.top_ids) // max(1, len(found.logprobs))
    tops = [TokenLogprob(token_id=i, logprob=x) for i, x in zip(found.top_ids, found.top_logprobs, strict=True)]
    positions = (
        PositionLogprobs(
            chosen=TokenLogprob(token_id=token, logprob=logprob),
            top=tuple(tops[index * num_top : (index + 1) * num_top]),
        )
        for index, (token, logprob) in enumerate(zip(prompt_token_ids[1:], found.logprobs, strict=True))
    )
    return (None, *positions)


def collect(
    prompt_token_ids: tuple[int, ...],
    deltas: Iterable[Delta],
    summary: Summary,
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = (),
) -> Completion:
    """The whole answer of the deltas of one stream, choices in the order of their index."""
    by_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.choice, []).append(delta)
    choices = tuple(_join(by_choice[choice]) for choice in sorted(by_choice))
    return Completion(
        prompt_token_ids=prompt_token_ids, choices=choices, summary=summary, prompt_logprobs=prompt_logprobs
    )


def _merge_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _merge(request, "text", prompt)
        return
    items = list(prompt)
    if items and isinstance(items[0], Mapping):
        _merge(request, "chat", {"messages": items})
    else:
        _merge(request, "tokens", {"ids": items})


def _merge_chat(request: pb.GenerateRequest, name: str, value: object) -> None:
    """Into the chat. Raises InvalidArgument where the prompt is none."""
    if not request.HasField("chat"):
        raise InvalidArgument(f"{name}: only a chat has {name}", field=name)
    _merge(request.chat, name, _json(name, value) if name == "template_kwargs" else value)


def _merge_constraint(request: pb.GenerateRequest, value: object) -> None:
    """Raises InvalidArgument for several, of which a message would keep the last, and for a value of another kind."""
    name = "structured_outputs"
    if not isinstance(value, Mapping) or len(value) != 1:
        raise InvalidArgument(f"{name}: expected a mapping of one name", field=name)
    ((kind, constraint),) = value.items()
    if kind == "choice":
        constraint = {"texts": constraint}
    if kind == "json_schema" and not isinstance(constraint, str):
        constraint = _json(name, constraint)
    _merge(request, name, {kind: constraint})


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: {error}", field=name) from None


def _holder(request: pb.GenerateRequest, name: str) -> Message:
    """The message, of the request's own, that an option is a field of."""
    for message in (request.sampling, request.stop):
        if name in message.DESCRIPTOR.fields_by_name:
            return message
    if name in _REQUEST_OPTIONS:
        return request
    raise TypeError(f"unknown option {name!r}")


def _merge(message: Message, name: str, value: object) -> None:
    """Sets one field of any kind (scalar, repeated, map, message), as the message's constructor would."""
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: {error}", field=name) from None


def _join(deltas: list[Delta]) -> Choice:
    return Choice(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(position for delta in deltas for position in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        tool_calls=whole_calls(part for delta in deltas for part in delta.tool_calls),
        reasoning="".join(delta.reasoning for delta in deltas),
    )


def whole_calls(parts: Iterable[ToolCallPart]) -> tuple[ToolCall, ...]:
    """What one answer's parts, in their order, add up to. InternalError for a part of a call that has not begun."""
    calls: list[tuple[str, str, list[str]]] = []
    for part in parts:
        if part.id:
            calls.append((part.id, part.name, [part.arguments]))
        elif calls:
            calls[-1][2].append(part.arguments)
        else:
            raise InternalError("the stream has a part of a tool call that has not begun")
    return tuple(ToolCall(id=call_id, name=name, arguments="".join(pieces)) for call_id, name, pieces in calls)


def _decode_position(position: pb.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(chosen=_decode_token(position.chosen), top=tuple(map(_decode_token, position.top)))


def _decode_token(token: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=token.token_id, logprob=token.logprob)


def decode_finish_reason(number: int) -> FinishReason | None:
    """None while the choice goes on."""
    if number not in _FINISH_REASONS:
        raise InternalError(f"finish reason {number} is unknown to this client: the server is newer")
    return _FINISH_REASONS[number]


def decode_stop_reason(delta: pb.Delta) -> int | str | None:
    """The stop string or stop token that ended the choice, where one did."""
    if delta.HasField("stop_string"):
        return delta.stop_string
    return delta.stop_token_id if delta.HasField("stop_token_id") else None
