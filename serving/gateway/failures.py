"""What failed one request so far, and what follows: to whom it should not go again, and when it is over.

Pure. Apart from `attempts`, which acts on it. A worker that is gone, a transfer that failed or a decode worker without
room is no fault of the request, which may go on elsewhere; what a worker says of the request itself is final.
"""

from dataclasses import dataclass, field

from moonshard.rpc.status import Cancelled, DeadlineExceeded, Overloaded, RequestError, Unavailable
from moonshard.serving.control.handoff.messages import Cause

RETRY_AFTER_S = 1.0
_FINAL_CAUSES = (Cause.DEADLINE, Cause.CANCELLED)
_SPARES_PREFILL = (Cause.OVERLOADED, Cause.DECODE_GONE)


class HandoffFailed(Unavailable):
    """A handoff ended before its request did. Never a client's to see: `final_error` says what it is told."""

    def __init__(self, cause: Cause, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"the handoff failed: {cause.value}", retry_after_s=retry_after_s or RETRY_AFTER_S)
        self.cause = cause


@dataclass(kw_only=True, slots=True)
class Failures:
    """Of one request. A worker is known by its epoch: restarted, it is another."""

    max_attempts: int
    epochs: set[int] = field(default_factory=set)  # of workers that failed it
    num_attempts: int = 0  # that failed
    num_prefill: int = 0  # of these: where the prefill worker may be to blame
    overloaded: HandoffFailed | None = None  # the last failure, where it was that

    def add(self, error: RequestError, *, decode_epoch: int, prefill_epoch: int | None) -> str:
        """Count it in; its cause in a word. Raises what the client is told where there is nothing left to try."""
        self.num_attempts += 1
        if not is_retryable(error) or self.num_attempts >= self.max_attempts:
            raise final_error(error)
        cause = error.cause if isinstance(error, HandoffFailed) else None
        self.overloaded = error if isinstance(error, HandoffFailed) and error.cause is Cause.OVERLOADED else None
        if cause is not Cause.PREFILL_GONE:
            self.epochs.add(decode_epoch)
        if cause is not None and cause not in _SPARES_PREFILL:
            self.num_prefill += 1
            if prefill_epoch is not None:
                self.epochs.add(prefill_epoch)
        return "worker_gone" if cause is None else cause.name.lower()


def is_retryable(error: RequestError) -> bool:
    return isinstance(error, Unavailable) and getattr(error, "cause", None) not in _FINAL_CAUSES


def final_error(error: RequestError) -> RequestError:
    """What a client is told of it."""
    if not isinstance(error, HandoffFailed):
        return error
    match error.cause:
        case Cause.OVERLOADED:
            return Overloaded("no decode worker has room", retry_after_s=error.retry_after_s)
        case Cause.DEADLINE:
            return DeadlineExceeded("the handoff between the workers took too long")
        case Cause.CANCELLED:
            return Cancelled("the request was cancelled")
        case _:
            return Unavailable(error.message, retry_after_s=error.retry_after_s)
