"""What happens to a request in the gateway: the entries of its log (`log`), plain data with a stamp each.

Stamps are of `perf_counter_ns`, one clock in one process; what a worker measured comes as a duration. An event is
stamped when it is made, unless it says when it happened.
"""

import asyncio
import time
from dataclasses import dataclass, field

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError
from moonshard.serving.gateway.failures import HandoffFailed
from moonshard.serving.gateway.refusals import Limit, LimitReached
from moonshard.serving.observe.spans.span import CANCELLED

COMPLETED = "completed"
UNEXPECTED = "internal error"  # for what its client is told no more of: it may quote a prompt


@dataclass(frozen=True, slots=True)
class Leg:
    """Where a part of an attempt runs."""

    worker: str  # its address
    epoch: bytes
    partition: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where an attempt was sent. `prefill` is None where the worker that decodes prefills too: its KV does not move."""

    attempt_id: bytes
    prefill: Leg | None
    decode: Leg

    @property
    def is_local_prefill(self) -> bool:
        return self.prefill is None

    @property
    def prompt_leg(self) -> Leg:
        """Where its prompt is computed."""
        return self.prefill or self.decode


@dataclass(frozen=True, slots=True)
class StampedEvent:
    """What all events have, but for `TokensArrived`."""

    at_ns: int = field(default_factory=time.perf_counter_ns, kw_only=True)


@dataclass(frozen=True, slots=True)
class RequestReceived(StampedEvent):
    """The first event of each log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTokenized(StampedEvent):
    """The prompt is tokenised, and what workers are to compute is known and valid."""

    num_prompt_tokens: int  # as the client counts them
    max_tokens: int  # likewise, of each choice
    num_choices: int
    num_forced_tokens: int = 0  # prompt to the workers, and to the client the beginning of each choice


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSent(StampedEvent):
    """The request is on its way to workers, for the first time or again."""

    worker_index: int  # of the one that decodes it
    assignment: Assignment
    is_prefill_at_decode: bool = False  # its prompt went to a worker that only decodes, though others prefill
    has_tiers: bool = False  # its prompt went to a worker with tiers below its device's pages


@dataclass(frozen=True, slots=True)
class AttemptReserved(StampedEvent):
    """The decode worker has room for the attempt, which waited so long in that worker's queue."""

    queue_ms: float


@dataclass(frozen=True, slots=True)
class AttemptMoved(StampedEvent):
    """All of its KV is with the worker that decodes it."""

    transfer: link_pb2.TransferPhases


@dataclass(slots=True)
class TokensArrived:
    """A step's output, and what of it the client is told. `delta` is None for what came after its choice had ended.

    There are as many as tokens: so it is not frozen, which would take three times as long to make.
    """

    at_ns: int
    output: link_pb2.SequenceOutput
    delta: pb.Delta | None


@dataclass(frozen=True, slots=True)
class FirstDelivered(StampedEvent):
    """The first tokens have left the gateway."""


@dataclass(frozen=True, slots=True)
class AttemptFailed(StampedEvent):
    """What ends the attempt, in a word: why a handoff failed, or the code of its error."""

    cause: str

    @classmethod
    def of(cls, error: RequestError) -> "AttemptFailed":
        return cls(error.cause.name.lower() if isinstance(error, HandoffFailed) else code_of(error))


@dataclass(frozen=True, slots=True)
class RequestRetried(StampedEvent):
    """The request is to go on with another attempt. `cause`: what the last one had lost, in a word."""

    cause: str


@dataclass(frozen=True, slots=True)
class AttemptEnded(StampedEvent):
    """The attempt that was sent last is over, however it ended."""


@dataclass(frozen=True, slots=True)
class RequestEnded(StampedEvent):
    """The last event of each log. It holds no error: that would hold the frames it passed, and they the log."""

    outcome: str = COMPLETED  # or `cancelled`, or the code of its error
    message: str | None = None  # of its error, as its client was told
    limit: Limit | None = None  # of the gateway, by which it was refused

    @classmethod
    def by(cls, error: BaseException) -> "RequestEnded":
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return cls(CANCELLED)
        if not isinstance(error, RequestError):
            return cls(code_of(error), UNEXPECTED if isinstance(error, Exception) else None)
        limit = error.limit if isinstance(error, LimitReached) else None
        return cls(code_of(error), error.message or None, limit)

    @property
    def is_complete(self) -> bool:
        """Whether the request has had all its tokens."""
        return self.outcome == COMPLETED


type LogEvent = (
    RequestReceived
    | RequestTokenized
    | AttemptSent
    | AttemptReserved
    | AttemptMoved
    | TokensArrived
    | FirstDelivered
    | AttemptFailed
    | RequestRetried
    | AttemptEnded
    | RequestEnded
)


def code_of(error: BaseException) -> str:
    return error.code.name.lower() if isinstance(error, RequestError) else "internal_error"
