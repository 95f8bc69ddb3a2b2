"""How many tokens a tenant may use: a window that slides over its last minute.

A prompt is refused where the window has no room for it and for those that are on their way, and counts once a worker
has computed it. How long a completion gets is known only afterwards: its tokens are owed, and paid before the tenant's
next prompt. So a tenant gets no more than its rate in the long run, and a prompt that is refused, for this or for
anything else, here or by a worker, uses up nothing. Time is this process's own and not the day's: whoever sets the
machine's clock lets nobody through and locks nobody out. Each gateway counts for itself.
"""

import time
from collections import Counter
from collections.abc import Callable

from moonshard.serving.control.sliding_window import SlidingWindow
from moonshard.serving.gateway.refusals import Limit, LimitReached

WINDOW_S = 60
LIMIT: Limit = "tenant_tokens_per_minute"


class TokenRates:
    """The rates of all tenants, each by itself."""

    def __init__(
        self, num_tokens: int, window_s: int = WINDOW_S, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = num_tokens
        self._window = SlidingWindow(window_s)
        self._clock_s = clock_s
        self._owed = Counter[str]()  # tokens that were used, and are not in the window yet
        self._held = Counter[str]()  # of prompts that were sent, and of which nothing is known yet

    def admit(self, tenant: str, num_tokens: int) -> None:
        """Raises LimitReached where there is no room for a prompt, without a delay where no wait makes any."""
        limit, window_s = self._limit, self._window.window_s
        if num_tokens > limit:
            raise LimitReached(
                LIMIT, f"{num_tokens} tokens are more than {limit} in {window_s} s, which is the tenant's rate"
            )
        owed, needed = self._pay(tenant), self._held[tenant] + num_tokens
        if owed or needed > self._room(tenant):
            wait_s = self._window.wait_s(tenant, max(0, limit - owed - needed), self._clock_s())
            raise LimitReached(
                LIMIT,
                f"with this prompt's {num_tokens} tokens the tenant would have more than its {limit} in {window_s} s",
                retry_after_s=wait_s,
            )

    def hold(self, tenant: str, num_tokens: int) -> None:
        """A prompt is on its way. Whoever calls this calls `release` exactly once."""
        self._held[tenant] += num_tokens

    def release(self, tenant: str, num_tokens: int) -> None:
        """Ends a hold: the prompt was either computed, which `used` counts, or refused."""
        self._held[tenant] -= num_tokens

    def used(self, tenant: str, num_tokens: int) -> None:
        """A prompt of so many tokens was computed, or a completion has ended."""
        self._owed[tenant] += num_tokens
        self._pay(tenant)

    def _pay(self, tenant: str) -> int:
        """Pays as much of what is owed as there is room for; returns what is still owed."""
        paid = min(self._owed[tenant], self._room(tenant))
        self._window.use(tenant, paid, self._clock_s())
        self._owed[tenant] -= paid
        return self._owed[tenant]

    def _room(self, tenant: str) -> int:
        return max(0, self._limit - self._window.num_used(tenant, self._clock_s()))
