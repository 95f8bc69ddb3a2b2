"""Link messages to the control plane's nouns and back, on the worker's side.

The gateway has checked what clients send; what is checked here protects the device from a gateway that did not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moonshard.kv.prefix import NAME_BYTES, block_names, split_names
from moonshard.rpc import inference_pb2, link_pb2
from moonshard.rpc.link import REQUEST_ID_BYTES
from moonshard.rpc.status import InvalidArgument, Overloaded, RequestError
from moonshard.serving.constrained.grammars import MAX_GRAMMAR_CHARS
from moonshard.serving.control.batching.queue import NeverFits, QueueFull, QueueTimeout, Rejected
from moonshard.serving.control.request import (
    BACKGROUND,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_TOKENS,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Request,
)
from moonshard.serving.control.sampling_parameters import PARAMETERS, Sampling
from moonshard.serving.engine.clocks import Phases
from moonshard.serving.engine.events import Emitted

type Came = Callable[[bytes], Mapping[str, int]]

MAX_ROOT_BYTES = 64
MAX_BIAS = 100.0  # what the public API allows

_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The model's limits, which a message must keep."""

    vocab_size: int
    block_size: int  # tokens
    max_context_tokens: int


def request_from(run: link_pb2.Run, limits: Limits) -> Request:
    """The request with the names of all full blocks of its prompt. Raises InvalidArgument naming the field."""
    _check(run, limits)
    sampling = run.sampling
    prompt = tuple(run.prompt_tokens)
    names = split_names(run.block_names) or block_names(run.prefix_root, prompt, limits.block_size)
    return Request(
        id=run.request_id,
        prompt=prompt,
        sampling=Sampling(
            **{each.name: getattr(sampling, each.name) for each in PARAMETERS},
            logit_bias=dict(zip(sampling.bias_ids, sampling.bias_values, strict=True)),
        ),
        stop_token_ids=frozenset(run.stop_token_ids),
        max_tokens=run.max_tokens,
        min_tokens=run.min_tokens,
        n=run.n,
        num_logprobs=run.logprobs if run.HasField("logprobs") else None,
        priority=run.priority,
        num_prompt_logprobs=run.prompt_logprobs if run.HasField("prompt_logprobs") else None,
        grammar=run.grammar,
        prefix_root=run.prefix_root,
        block_names=tuple(names),
    )


def _check(run: link_pb2.Run, limits: Limits) -> None:
    """Lengths are checked before contents: what is too long is not looked at."""
    if len(run.prompt_tokens) > limits.max_context_tokens:
        num_tokens = len(run.prompt_tokens)
        raise InvalidArgument(f"the prompt has {num_tokens} tokens, {limits.max_context_tokens} fit", field="prompt")
    sampling, names = run.sampling, run.block_names
    num_name_bytes = len(run.prompt_tokens) // limits.block_size * NAME_BYTES
    _refuse_first(
        {
            "request_id": len(run.request_id) != REQUEST_ID_BYTES,
            "prompt_tokens": not _are_tokens(run.prompt_tokens, limits),
            "stop_token_ids": len(run.stop_token_ids) > MAX_STOP_TOKENS or not _are_tokens(run.stop_token_ids, limits),
            "bias_ids": len(sampling.bias_ids) > MAX_LOGIT_BIAS or not _are_tokens(sampling.bias_ids, limits),
            "bias_values": len(sampling.bias_values) != len(sampling.bias_ids)
            or not all(abs(value) <= MAX_BIAS for value in sampling.bias_values),
            "min_tokens": run.min_tokens > run.max_tokens > 0,
            "n": run.n > MAX_CHOICES,
            "logprobs": run.logprobs > MAX_LOGPROBS,
            "priority": not -MAX_PRIORITY <= run.priority <= MAX_PRIORITY + BACKGROUND,
            "prompt_logprobs": run.prompt_logprobs > MAX_LOGPROBS or not _fit_in_one_answer(run),
            "grammar": len(run.grammar) > MAX_GRAMMAR_CHARS,
            "prefix_root": len(run.prefix_root) > MAX_ROOT_BYTES,
            "block_names": len(names) not in (0, num_name_bytes) or len(names) != NAME_BYTES * _num_distinct(names),
            **{each.name: getattr(sampling, each.name) not in each.engine_bounds for each in PARAMETERS},
        }
    )


def _fit_in_one_answer(run: link_pb2.Run) -> bool:
    """Whether the log-probabilities of the prompt are few enough to be sent in one piece."""
    num_of_each = 1 + run.prompt_logprobs if run.HasField("prompt_logprobs") else 0
    return len(run.prompt_tokens) * num_of_each <= MAX_PROMPT_LOGPROBS


def _refuse_first(faults: Mapping[str, bool]) -> None:
    for field, is_wrong in faults.items():
        if is_wrong:
            raise InvalidArgument(f"{field} of a Run message is out of range", field=field)


def _are_tokens(ids: Sequence[int], limits: Limits) -> bool:
    return max(ids, default=0) < limits.vocab_size


def _num_distinct(names: bytes) -> int:
    return len(set(split_names(names)))


def resumed_from(run: link_pb2.Run, limits: Limits) -> dict[int, tuple[int, ...]] | None:
    """The tokens that each choice goes on from; None where all begin. InvalidArgument as above."""
    if not run.resumed:
        return None
    choices = {resumed.choice for resumed in run.resumed}
    num_most = max(len(resumed.token_ids) for resumed in run.resumed)
    if len(choices) < len(run.resumed) or len(choices) > MAX_CHOICES or num_most > limits.max_context_tokens:
        raise InvalidArgument("resumed of a Run message is out of range", field="resumed")
    if not all(_are_tokens(resumed.token_ids, limits) for resumed in run.resumed):
        raise InvalidArgument("resumed of a Run message is out of range", field="resumed")
    return {resumed.choice: tuple(resumed.token_ids) for resumed in run.resumed}


def partition_from(run: link_pb2.Run) -> int | None:
    """The partition that the request is sent to; None where the worker chooses."""
    return run.partition if run.HasField("partition") else None


def check_first_tokens(start: link_pb2.Start, limits: Limits) -> None:
    """Raises InvalidArgument for an id that is no token of the model: the device would decode from it all the same."""
    if len(start.token_ids) > MAX_CHOICES or not _are_tokens(start.token_ids, limits):
        raise InvalidArgument("token_ids of a Start message is out of range", field="token_ids")
    if start.guesses and len(start.guesses) != len(start.token_ids):
        raise InvalidArgument("guesses of a Start message are not one for each choice", field="guesses")
    if not all(_are_tokens(each.token_ids, limits) for each in start.guesses):
        raise InvalidArgument("guesses of a Start message are out of range", field="guesses")


def rejection(error: Rejected) -> RequestError:
    """The scheduler's refusal as the error that the request ends with."""
    match error:
        case NeverFits(field=field):
            return InvalidArgument(error.message, field=field)
        case QueueFull(retry_after_s=seconds) | QueueTimeout(retry_after_s=seconds):
            return Overloaded(error.message, retry_after_s=seconds)
        case _:
            return Overloaded(error.message)


def failed(request_id: bytes, error: RequestError) -> link_pb2.WorkerMessage:
    return link_pb2.WorkerMessage(
        failed=link_pb2.Failed(
            request_id=request_id,
            code=error.code.value[0],
            message=error.message,
            field=error.field or "",
            retry_after_s=error.retry_after_s or 0.0,
        )
    )


def sequence_output(emitted: Emitted, came: Came) -> link_pb2.SequenceOutput:
    """`came` says of a request how many tokens of its prompt came from each tier below the device's pages."""
    output = emitted.output
    request_id, choice = output.sequence
    if emitted.phases is None and output.finish is None and not (output.logprobs or output.guesses):  # nearly all
        return link_pb2.SequenceOutput(request_id=request_id, choice=choice, token_ids=output.token_ids)
    return link_pb2.SequenceOutput(
        request_id=request_id,
        choice=choice,
        token_ids=output.token_ids,
        logprobs=[
            _position_logprobs(token, logprobs)
            for token, logprobs in zip(output.token_ids, output.logprobs, strict=False)
        ],
        finish_reason=_FINISH[output.finish],
        cached_tokens=output.num_cached_tokens,
        phases=_phases(emitted.phases),
        prompt_logprobs=_prompt_logprobs(output.prompt_logprobs),
        guesses=output.guesses,
        cached_by_tier=came(request_id) if output.num_cached_tokens else None,
    )


def _prompt_logprobs(found: PromptLogprobs | None) -> inference_pb2.PromptLogprobs | None:
    if found is None:
        return None
    return inference_pb2.PromptLogprobs(
        logprobs=found.logprobs, ranks=found.ranks, top_ids=found.top_ids, top_logprobs=found.top_logprobs
    )


def _position_logprobs(token: int, logprobs: Logprobs) -> inference_pb2.PositionLogprobs:
    return inference_pb2.PositionLogprobs(
        chosen=inference_pb2.TokenLogprob(token_id=token, logprob=logprobs.chosen),
        top=[inference_pb2.TokenLogprob(token_id=id, logprob=logprob) for id, logprob in logprobs.top],
    )


def _phases(phases: Phases | None) -> link_pb2.WorkerPhases | None:
    if phases is None:
        return None
    return link_pb2.WorkerPhases(
        queue_ms=phases.queue_ms,
        prefill_ms=phases.prefill_ms,
        decode_ms=phases.decode_ms,
        land_ms=phases.land_ms,
        join_ms=phases.join_ms,
    )
