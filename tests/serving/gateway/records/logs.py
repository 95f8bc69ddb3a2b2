"""Logs of requests whose stamps a test chooses."""

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.serving.gateway.records.events import Assignment, AttemptSent, Leg, RequestTokenized, TokensArrived
from moonshard.serving.gateway.records.log import OpenReader, RequestLog
from moonshard.serving.gateway.request import GenerationRequest, TokenPrompt

ASSIGNMENT = Assignment(attempt_id=b"a" * 16, prefill=None, decode=Leg("w:1", b"e", 0))


def log_of(*readers: OpenReader, num_choices: int = 1, num_prompt_tokens: int = 4) -> RequestLog:
    """The log of a request that is tokenised and arrived at time 0."""
    request = GenerationRequest(request_id="r", received_ns=0, prompt=TokenPrompt([1]), n=num_choices)
    log = RequestLog(request, readers)
    log.append(
        RequestTokenized(num_prompt_tokens=num_prompt_tokens, max_tokens=9, num_choices=num_choices, at_ns=0),
    )
    return log


def sent(at_ns: int) -> AttemptSent:
    return AttemptSent(worker_index=0, assignment=ASSIGNMENT, at_ns=at_ns)


def found(at_ns: int, num_cached: int, **by_tier: int) -> TokensArrived:
    """A token of a prompt of which so much was found, some of it in tiers."""
    output = link_pb2.SequenceOutput(token_ids=[1], cached_tokens=num_cached, cached_by_tier=by_tier)
    return TokensArrived(at_ns, output, pb.Delta(token_ids=[1]))


def arrived(at_ns: int, choice: int = 0, *, is_last: bool = False, **phases_ms: float) -> TokensArrived:
    """One token that arrives and is sent to the client."""
    finish_reason = pb.FINISH_REASON_LENGTH if is_last else pb.FINISH_REASON_UNSPECIFIED
    phases = link_pb2.WorkerPhases(**phases_ms) if phases_ms else None
    output = link_pb2.SequenceOutput(choice=choice, token_ids=[1], phases=phases, finish_reason=finish_reason)
    return TokensArrived(at_ns, output, pb.Delta(choice=choice, token_ids=[1], finish_reason=finish_reason))
