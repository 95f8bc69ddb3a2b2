"""What the errors of links and handoffs become: failures for the control plane, and errors that clients can act on.

What may be tried again is decided in `control.dispatch.retries`.
"""

from moonshard.rpc.status import Cancelled, Overloaded, RequestError, Unavailable
from moonshard.serving.control.dispatch.retries import Failure, LegFailure
from moonshard.serving.control.handoff.messages import Cause

RETRY_AFTER_S = 1.0


class HandoffFailed(Unavailable):
    """A handoff ended before its request did. Clients never see this error: `final_error` is what they are told."""

    def __init__(self, cause: Cause, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"the handoff failed: {cause.value}", retry_after_s=retry_after_s or RETRY_AFTER_S)
        self.cause = cause


def failure_of(error: RequestError) -> Failure:
    """The failure that ended an attempt, as the control plane names it."""
    if isinstance(error, HandoffFailed):
        return error.cause
    return LegFailure.WORKER_GONE if isinstance(error, Unavailable) else LegFailure.REFUSED


def final_error(error: RequestError) -> RequestError:
    """The error that a client is told."""
    if not isinstance(error, HandoffFailed):
        return error
    match error.cause:
        case Cause.OVERLOADED:
            return Overloaded("no decode worker has room", retry_after_s=error.retry_after_s)
        case Cause.CANCELLED:
            return Cancelled("the request was cancelled")
        case _:
            return Unavailable(error.message, retry_after_s=error.retry_after_s)
