"""How many tokens a tenant may use: a window that slides over its last minute.

A prompt is refused where the window has no room for it and for those that are on their way, and counts once a worker
has computed it. How long a completion gets is known only afterwards: its tokens are owed, and paid before the tenant's
next prompt. So a tenant gets no more than its rate in the long run, and a prompt that is refused, for this or for
anything else, here or by a worker, uses up nothing. The window is the library `limits`' sliding counter: two numbers
for each tenant. Left out: rates that several gateways share.
"""

from collections import Counter

from limits import RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from moonshard.rpc.status import Overloaded

WINDOW_S = 60


class TokenRates:
    """Of all tenants, each by itself."""

    def __init__(self, num_tokens: int, window_s: int = WINDOW_S) -> None:
        self._item = RateLimitItemPerSecond(num_tokens, window_s)
        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)
        self._owed = Counter[str]()  # tokens that were used, and are not in the window yet
        self._held = Counter[str]()  # of prompts that were sent, and of which nothing is known yet

    def admit(self, tenant: str, num_tokens: int) -> None:
        """Raises Overloaded where there is no room for a prompt, without a delay where no wait makes any."""
        limit, window_s = self._item.amount, self._item.get_expiry()
        if num_tokens > limit:
            raise Overloaded(f"{num_tokens} tokens are more than {limit} in {window_s} s, which is the tenant's rate")
        owed, needed = self._pay(tenant), self._held[tenant] + num_tokens
        if owed or not self._limiter.test(self._item, tenant, cost=needed):
            wait_s = self._wait_s(tenant, min(limit, owed + needed))
            raise Overloaded(
                f"with this prompt's {num_tokens} tokens the tenant would have more than its {limit} in {window_s} s",
                retry_after_s=wait_s,
            )

    def hold(self, tenant: str, num_tokens: int) -> None:
        """A prompt is on its way. Whoever calls this calls `release` exactly once."""
        self._held[tenant] += num_tokens

    def release(self, tenant: str, num_tokens: int) -> None:
        """What became of it is known: it is `used` now, or was refused."""
        self._held[tenant] -= num_tokens

    def used(self, tenant: str, num_tokens: int) -> None:
        """A prompt of so many tokens was computed, or a completion has ended."""
        self._owed[tenant] += num_tokens
        self._pay(tenant)

    def _pay(self, tenant: str) -> int:
        """As far as there is room; what is still owed."""
        owed = self._owed[tenant]
        paid = min(owed, self._limiter.get_window_stats(self._item, tenant).remaining)
        if paid and self._limiter.hit(self._item, tenant, cost=paid):
            self._owed[tenant] = owed = owed - paid
        return owed

    def _wait_s(self, tenant: str, num_tokens: int) -> float:
        """Until that many have room, if nobody else comes.

        The count is this window's, and of the last window's as much as still lies within one window's length.
        """
        window_s = self._item.get_expiry()
        key = self._item.key_for(tenant)
        before, before_left_s, now, now_left_s = self._storage.get_sliding_window(key, window_s)
        room = self._item.amount - num_tokens
        if now <= room:
            return max(0.0, before_left_s - window_s * (room - now) / before) if before else 0.0
        return now_left_s - window_s * room / now
