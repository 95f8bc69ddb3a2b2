"""What failed one request so far, and what follows: to whom it should not go again, and when it is over.

A worker that is gone, a transfer that failed or a decode worker without room is no fault of the request, which may go
on elsewhere. What a worker says of the request itself is final.
"""

import enum
from dataclasses import dataclass, field

from moonshard.serving.control.handoff.messages import Cause

MAX_PREFILL_FAILURES = 2  # then the decode worker prefills
_SPARES_PREFILL = (Cause.OVERLOADED, Cause.DECODE_GONE)


class LegFailure(enum.Enum):
    """Why an attempt failed where no handoff tells."""

    WORKER_GONE = "its worker is gone, or takes nothing now"
    REFUSED = "its worker says so of the request itself"


type Failure = Cause | LegFailure


@dataclass(kw_only=True, slots=True)
class Retries:
    """The failures of one request. A worker is known by its epoch: after a restart it counts as another."""

    max_attempts: int
    failed_epochs: set[int] = field(default_factory=set[int])  # of workers that failed it
    num_failed: int = 0  # attempts
    num_prefill_failed: int = 0  # of these: where the prefill worker may be to blame
    no_room_retry_after_s: float | None = None  # the last failure was of a decode worker without room, that said so
    wait_end_s: float | None = None  # until then it waits for a worker; None: it does not wait

    @property
    def may_prefill_elsewhere(self) -> bool:
        """False where the worker that decodes the request must also prefill it."""
        return self.num_prefill_failed < MAX_PREFILL_FAILURES

    def failed(
        self, failure: Failure, *, decode_epoch: int, prefill_epoch: int | None, retry_after_s: float | None = None
    ) -> bool:
        """Counts a failure; says whether the request may be tried again."""
        self.num_failed += 1
        if not is_retryable(failure) or self.num_failed >= self.max_attempts:
            return False
        self.no_room_retry_after_s = (retry_after_s or 0.0) if failure is Cause.OVERLOADED else None
        if failure is not Cause.PREFILL_GONE:
            self.failed_epochs.add(decode_epoch)
        if isinstance(failure, Cause) and failure not in _SPARES_PREFILL:
            self.num_prefill_failed += 1
            if prefill_epoch is not None:
                self.failed_epochs.add(prefill_epoch)
        return True

    def waits(self, now_s: float, max_wait_s: float) -> float | None:
        """There is no worker: the time until which the request waits for one. None where it does not wait, or has
        waited.

        Only a request that lost its worker waits; a new one is refused at once.
        """
        if not self.num_failed:
            return None
        if self.wait_end_s is None:
            self.wait_end_s = now_s + max_wait_s
        return self.wait_end_s if now_s < self.wait_end_s else None


def is_retryable(failure: Failure) -> bool:
    return failure not in (LegFailure.REFUSED, Cause.CANCELLED)
