"""The errors with which the gateway refuses a request by a limit of its own, before any worker is asked. Metrics tell
the limits apart.
"""

from typing import Literal

from moonshard.rpc.status import Overloaded

type Limit = Literal["max_queued_requests", "ttft_slo", "tenant_tokens_per_minute"]


class LimitReached(Overloaded):
    """To clients it is an `Overloaded` like any other."""

    def __init__(
        self,
        limit: Limit,
        message: str,
        *,
        retry_after_s: float | None = None,
        predicted_ttft_s: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, predicted_ttft_s=predicted_ttft_s)
        self.limit: Limit = limit
