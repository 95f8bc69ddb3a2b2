"""How the errors of links and handoffs are told: to the control plane as failures, to clients as what they can act on.

What may be tried again is decided in `control.dispatch.retries`.
"""

from moonshard.rpc.status import Cancelled, Overloaded, RequestError, Unavailable
from moonshard.serving.control.dispatch.retries import Failure, LegFailure
from moonshard.serving.control.handoff.messages import Cause

RETRY_AFTER_S = 1.0


class HandoffFailed(Unavailable):
    """A handoff ended before its request did. Never a client's to see: `final_error` says what it is told."""

    def __init__(self, cause: Cause, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"the handoff failed: {cause.value}", retry_after_s=retry_after_s or RETRY_AFTER_S)
        self.cause = cause


def failure_of(error: RequestError) -> Failure:
    """What ended an attempt, to the control plane."""
    if isinstance(error, HandoffFailed):
        return error.cause
    return LegFailure.WORKER_GONE if isinstance(error, Unavailable) else LegFailure.REFUSED


def final_error(error: RequestError) -> RequestError:
    """What a client is told of it."""
    if not isinstance(error, HandoffFailed):
        return error
    match error.cause:
        case Cause.OVERLOADED:
            return Overloaded("no decode worker has room", retry_after_s=error.retry_after_s)
        case Cause.CANCELLED:
            return Cancelled("the request was cancelled")
        case _:
            return Unavailable(error.message, retry_after_s=error.retry_after_s)
